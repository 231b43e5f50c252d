// A recurrent layer between its projections, computed by a team.
#pragma once

#include "recurrent_heads.h"
#include "team.h"

namespace recurrent {

class Call final : public team::Work {
  public:
    explicit Call(int num_threads) : scratches_(num_threads) {}

    // The convolution alone where `convolves_only`. False: there is no memory.
    bool run(team::Team* team, const Layer& layer, const Rows& rows, const Tokens& tokens, bool convolves_only) {
        layer_ = &layer, rows_ = &rows, tokens_ = &tokens, convolves_only_ = convolves_only;
        if (!convolves_only && !scratches_.reserve(layer)) return false;
        team::run(team, this);
        return true;
    }

    int num_phases() const override { return convolves_only_ ? 1 : tokens_->out && layer_->norm != NOTHING ? 3 : 2; }

    int num_chunks(int phase) const override {
        if (phase == 2) return (int)tokens_->count;
        return (int)rows_->count * (phase ? layer_->value_heads : conv_blocks(*layer_));
    }

    void compute(int phase, int chunk, int thread) override {
        if (phase == 0) return convolve_chunk(*layer_, *rows_, *tokens_, chunk);
        if (phase == 2) return norm_token(*layer_, *tokens_, chunk);
        recur_chunk(*layer_, *rows_, *tokens_, chunk, scratches_.of(thread));
    }

  private:
    Scratches scratches_;
    const Layer* layer_ = nullptr;
    const Rows* rows_ = nullptr;
    const Tokens* tokens_ = nullptr;
    bool convolves_only_ = false;
};

}  // namespace recurrent
