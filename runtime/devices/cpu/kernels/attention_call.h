// Attention of queries that the caller has, outside of a program: what a program does with four phases.
#pragma once

#include <array>

#include "attention.h"
#include "layers.h"
#include "team.h"

namespace attention {

inline Layer layer_of(const layers::Heads& h) {
    Layer layer{};
    layer.keys[0] = {h.k_cache, h.num_kv_heads, h.dim};
    layer.values = {h.v_cache, h.num_kv_heads, h.dim};
    layer.kind = h.kind;
    layer.pool = h.pool;
    layer.num_heads = h.num_heads;
    layer.num_kv_heads = h.num_kv_heads;
    layer.scale = h.scale * h.k_scale;
    layer.cap = h.cap;
    layer.window = h.window;
    layer.sinks = h.sinks;
    layer.slopes = h.slopes;
    layer.value_scale = h.v_scale;
    return layer;
}

// step->output [tokens, heads * dim] of step->input, the same. Keys and values are in the cache already.
class Call final : public team::Work {
  public:
    explicit Call(int num_threads) : scratches_(num_threads) {}

    // False: there is no memory.
    bool run(team::Team* team, const layers::Heads& heads, const Step& step) {
        queries_.shape(heads.num_heads * heads.dim, -1);
        out_.shape(heads.num_heads * heads.dim, -1);
        if (!queries_.reserve(step.num_tokens) || !out_.reserve(step.num_tokens)) return false;
        layers::Input input(&queries_);
        Attention attention(&queries_, &out_, layer_of(heads), scratches_);
        Join join(attention, scratches_);
        layers::Output output(&out_);
        phases_ = {&input, &attention, &join, &output};
        step_ = &step;
        for (size_t i = 0; i < phases_.size(); i++) chunks_[i] = phases_[i]->begin(step);
        team::run(team, this);
        return true;
    }

    int num_phases() const override { return (int)phases_.size(); }
    int num_chunks(int phase) const override { return chunks_[phase]; }
    void compute(int phase, int chunk, int thread) override { phases_[phase]->compute(*step_, chunk, thread); }

  private:
    Scratches scratches_;
    Buffer queries_{0, -1}, out_{0, -1};
    std::array<Phase*, 4> phases_{};
    int chunks_[4] = {};
    const Step* step_ = nullptr;
};

}  // namespace attention
