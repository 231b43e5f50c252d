// A program: phases in order, which the threads of a team compute in one call.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "layers.h"
#include "recurrent_phases.h"
#include "screen.h"
#include "team.h"

namespace program {

using layers::RotaryTables;
using step::Buffer;
using step::Phase;
using step::Step;

// Phases, and the buffers that they share.
class Program final : public team::Work {
  public:
    explicit Program(team::Team* team) : team_(team), scratches_(team::num_threads(team)), recurrent_(team::num_threads(team)) {}

    Buffer* add_buffer(int width, int form, int rows_per_token = 1) {
        buffers_.emplace_back(new Buffer(width, form, rows_per_token));
        return buffers_.back().get();
    }

    RotaryTables* add_rotary() {
        rotaries_.emplace_back(new RotaryTables{});
        return rotaries_.back().get();
    }

    experts::Assignment* add_assignment(int num_experts, int top_k) {
        assignments_.emplace_back(new experts::Assignment(num_experts, top_k));
        return assignments_.back().get();
    }

    experts::Counter* add_counter() {
        counters_.emplace_back(new experts::Counter{});
        return counters_.back().get();
    }

    screen::Pass* add_pass(const weights::Matrix& head, Buffer* head_inputs, Buffer* rough_inputs) {
        passes_.emplace_back(new screen::Pass(head, head_inputs, rough_inputs));
        return passes_.back().get();
    }

    void add(Phase* phase) { phases_.emplace_back(phase); }

    int num_threads() const { return team::num_threads(team_); }

    attention::Scratches& scratches() { return scratches_; }
    recurrent::Scratches& recurrent_scratches() { return recurrent_; }

    int size() const { return (int)phases_.size(); }

    // Phases `first` to `end`, which is not one of them. Those of a step may be computed in several calls, in order.
    bool run(const Step& step, int first, int end) {
        for (auto& buffer : buffers_)
            if (!buffer->reserve(step.num_tokens)) return false;
        for (auto& assignment : assignments_)
            if (!assignment->reserve(step.num_tokens)) return false;
        step_ = &step;
        first_ = first;
        chunks_.resize(end - first);
        for (int i = first; i < end; i++) chunks_[i - first] = phases_[i]->begin(step);
        team::run(team_, this);
        return true;
    }

    int num_phases() const override { return (int)chunks_.size(); }
    int num_chunks(int phase) const override { return chunks_[phase]; }
    void compute(int phase, int chunk, int thread) override {
        phases_[first_ + phase]->compute(*step_, chunk, thread);
    }

  private:
    team::Team* team_;
    attention::Scratches scratches_;
    recurrent::Scratches recurrent_;
    const Step* step_ = nullptr;
    int first_ = 0;  // phase of the call at hand
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<std::unique_ptr<RotaryTables>> rotaries_;
    std::vector<std::unique_ptr<experts::Assignment>> assignments_;
    std::vector<std::unique_ptr<experts::Counter>> counters_;
    std::vector<std::unique_ptr<screen::Pass>> passes_;
    std::vector<std::unique_ptr<Phase>> phases_;
    std::vector<int> chunks_;
};

}  // namespace program
