// One product outside of a program.
#pragma once

#include <array>

#include "layers.h"
#include "team.h"

namespace product_call {

using step::Buffer;
using step::Phase;
using step::Step;
using weights::Matrix;

// One product of rows that the caller has: what a program does with four phases, in memory that all products share.
class Product final : public team::Work {
  public:
    void run(team::Team* team, const Matrix* matrix, const Step* step, bool* has_memory) {
        floats_.shape(matrix->inputs, -1);
        inputs_.shape(matrix->inputs, weights::input_form(matrix->kind));
        out_.shape(matrix->outputs, -1);
        // Rows that need no padding are read and written where the caller has them.
        bool copies_in = !floats_.lend(const_cast<float*>(step->input)), copies_out = !out_.lend(step->output);
        *has_memory = inputs_.reserve(step->num_tokens) && (!copies_in || floats_.reserve(step->num_tokens)) &&
                      (!copies_out || out_.reserve(step->num_tokens));
        if (!*has_memory) return;
        layers::Input input(&floats_);
        layers::Prepare prepare(&floats_, nullptr, 0, &inputs_, layers::Prepare::PREPARE);
        layers::Linear linear(matrix, nullptr, &inputs_, &out_, layers::Linear::STORE, team::num_threads(team));
        layers::Output output(&out_);
        num_phases_ = 0;
        if (copies_in) phases_[num_phases_++] = &input;
        phases_[num_phases_++] = &prepare;
        phases_[num_phases_++] = &linear;
        if (copies_out) phases_[num_phases_++] = &output;
        step_ = step;
        for (int i = 0; i < num_phases_; i++) chunks_[i] = phases_[i]->begin(*step);
        team::run(team, this);
    }

    int num_phases() const override { return num_phases_; }
    int num_chunks(int phase) const override { return chunks_[phase]; }
    void compute(int phase, int chunk, int thread) override { phases_[phase]->compute(*step_, chunk, thread); }

  private:
    Buffer floats_{0, -1}, inputs_{0, 0}, out_{0, -1};
    std::array<Phase*, 4> phases_{};
    int num_phases_ = 0, chunks_[4] = {};
    const Step* step_ = nullptr;
};

}  // namespace product_call
