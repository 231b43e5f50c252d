// The experts of a layer outside of a program.
#pragma once

#include <array>

#include "experts.h"
#include "team.h"

namespace experts_call {

using step::Buffer;
using step::Phase;
using step::Step;
using weights::Matrix;

// What the experts of one layer do for rows that the caller has and has routed, in memory that all layers share.
class Call final : public team::Work {
  public:
    // `ids` and `shares` [tokens, top_k of pairs] are the caller's. False: there is no memory.
    bool run(team::Team* team, const experts::Weights* weights, experts::Assignment* pairs, const int32_t* ids,
             const float* shares, const Step* step) {
        const Matrix &first = *weights->gate_up[0], &second = *weights->down[0];
        floats_.shape(first.inputs, -1);
        inputs_.shape(first.inputs, weights::input_form(first.kind));
        inner_.shape(second.inputs, -1);
        refit_.shape(second.inputs, weights::input_form(second.kind));
        out_.shape(second.outputs, -1);
        int64_t tokens = step->num_tokens, rows = tokens * pairs->top_k;
        if (!floats_.reserve(tokens) || !inputs_.reserve(rows) || !inner_.reserve(rows) || !refit_.reserve(rows) ||
            !out_.reserve(tokens) || !pairs->reserve(tokens))
            return false;
        memcpy(pairs->ids, ids, rows * sizeof(int32_t));
        memcpy(pairs->weights, shares, rows * sizeof(float));
        layers::Input input(&floats_);
        experts::Sort sort(pairs, nullptr);
        experts::Spread spread(pairs, &floats_, &inputs_);
        experts::GateUp gate_up(weights, pairs, &inputs_, &inner_, team::num_threads(team));
        experts::Refit refit(pairs, &inner_, &refit_);
        experts::Down down(weights, pairs, &refit_, &out_, false, team::num_threads(team));
        layers::Output output(&out_);
        phases_ = {&input, &sort, &spread, &gate_up, &refit, &down, &output};
        step_ = step;
        for (size_t i = 0; i < phases_.size(); i++) chunks_[i] = phases_[i]->begin(*step);
        team::run(team, this);
        return true;
    }

    int num_phases() const override { return (int)phases_.size(); }
    int num_chunks(int phase) const override { return chunks_[phase]; }
    void compute(int phase, int chunk, int thread) override { phases_[phase]->compute(*step_, chunk, thread); }

  private:
    Buffer floats_{0, -1}, inputs_{0, 0}, inner_{0, -1}, refit_{0, 0}, out_{0, -1};
    std::array<Phase*, 7> phases_{};
    int chunks_[7] = {};
    const Step* step_ = nullptr;
};

}  // namespace experts_call
