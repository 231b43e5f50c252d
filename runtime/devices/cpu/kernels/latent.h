// Multi-head latent attention (DeepSeek-V2, 2024), absorbed: the matrices that make a head's keys and values from a
// latent move to the query and to the result, and all heads attend to the latents themselves, as to one key head. Prompts
// are absorbed as well, though expanding would be less work for long ones: so a row's bits do not depend on how it was
// cut.
#pragma once

#include <memory>

#include "attention.h"
#include "layers.h"
#include "team.h"

namespace latent {

using namespace simd;
using attention::Lines;
using step::Buffer;
using step::Number;
using step::Phase;
using step::Step;
using weights::Matrix;

// What a layer's latent attention is made of.
struct Latents {
    int num_heads, nope_dim, rope_dim, rank, value_dim;
    const Matrix* keys;    // [heads * padded rank, nope_dim]: latents to keys, turned; padded to whole blocks
    const Matrix* values;  // [heads * padded value_dim, rank]
    const float* norm;     // [rank], of latents
    float eps;
    const layers::RotaryTables* rotary;  // null: rotary parts are turned already
    char* latents;                       // [locations, 1, rank]
    char* ropes;                         // [locations, 1, rope_dim]
    Number kind;                         // of both
    int pool;
    float scale;
};

inline scores::Layer layer_of(const Latents& l) {
    scores::Layer layer{};
    layer.keys[0] = layer.values = {l.latents, 1, l.rank};
    layer.keys[1] = {l.ropes, 1, l.rope_dim};
    layer.num_pieces = 2;
    layer.kind = l.kind;
    layer.pool = l.pool;
    layer.num_heads = l.num_heads;
    layer.num_kv_heads = 1;
    layer.scale = l.scale;
    return layer;
}

inline void turn(float* x, const Latents& l, int64_t position) {
    int half = l.rope_dim / 2;
    layers::rotate(x, l.rotary->cos + position * half, l.rotary->sin + position * half, half);
}

// Of rows [query part, latent, rotary key]: normed latents and turned keys go to the cache, the query part to `queries` if
// there is such a buffer.
class Keep final : public Phase {
  public:
    Keep(Buffer* down, Buffer* queries, const Latents& latents) : down_(down), queries_(queries), l_(latents) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step& step, int chunk, int) override {
        const float* row = down_->row(chunk);
        int num_queries = down_->width - l_.rank - l_.rope_dim;
        if (queries_) memcpy(queries_->row(chunk), row, num_queries * sizeof(float));
        float latent[cache::MAX_DIM] = {}, rope[cache::MAX_DIM] = {};
        memcpy(latent, row + num_queries, l_.rank * sizeof(float));
        memcpy(rope, row + num_queries + l_.rank, l_.rope_dim * sizeof(float));
        layers::rms_norm(latent, l_.norm, l_.eps, l_.rank, latent);
        turn(rope, l_, step.positions[chunk]);
        int64_t location = step.locations[l_.pool][chunk];
        cache::write({l_.latents, 1, l_.rank}, l_.kind, location, 0, latent, 1);
        cache::write({l_.ropes, 1, l_.rope_dim}, l_.kind, location, 0, rope, 1);
    }

  private:
    Buffer* down_;
    Buffer* queries_;
    const Latents l_;
};

// Queries [tokens, heads * (nope + rope)] in two: inputs of the product that absorbs, and turned rotary parts behind the
// place of its results. Both have rows for each head.
class Split final : public Phase {
  public:
    Split(Buffer* queries, Buffer* inputs, Buffer* absorbed, const Latents& latents)
        : queries_(queries), inputs_(inputs), absorbed_(absorbed), l_(latents) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step& step, int chunk, int) override {
        float nope[cache::MAX_DIM];
        const float* from = queries_->row(chunk);
        for (int head = 0; head < l_.num_heads; head++, from += l_.nope_dim + l_.rope_dim) {
            int64_t row = head * step.num_tokens + chunk;
            memcpy(nope, from, l_.nope_dim * sizeof(float));
            memset(nope + l_.nope_dim, 0, (step::padded(l_.nope_dim) - l_.nope_dim) * sizeof(float));
            rows::prepare_row(nope, inputs_->prepared, (int)row);
            float* rope = absorbed_->row(row) + l_.rank;
            memcpy(rope, from + l_.nope_dim, l_.rope_dim * sizeof(float));
            if (l_.rotary) turn(rope, l_, step.positions[chunk]);
        }
    }

  private:
    Buffer* queries_;
    Buffer* inputs_;
    Buffer* absorbed_;
    const Latents l_;
};

// For each head a product of its own: rows [heads, tokens] of inputs with the head's blocks of a matrix, to `outputs`
// numbers of each token and head.
class HeadProducts final : public Phase {
  public:
    HeadProducts(const Matrix* weight, int num_heads, Buffer* in, Buffer* out, int outputs, int num_threads)
        : w_(*weight), num_heads_(num_heads), in_(in), out_(out), outputs_(outputs), num_threads_(num_threads),
          blocks_(weights::num_blocks(w_) / num_heads) {}

    int begin(const Step& step) override {
        to_ = Lines(*out_, outputs_, step.num_tokens);
        int at_once = layers::blocks_of_chunk(weights::block_bytes(w_), (int64_t)blocks_ * num_heads_, num_threads_);
        at_once_ = at_once < blocks_ ? at_once : blocks_;
        per_head_ = (blocks_ + at_once_ - 1) / at_once_;
        return num_heads_ * per_head_;
    }

    void compute(const Step& step, int chunk, int) override {
        int head = chunk / per_head_, first = chunk % per_head_ * at_once_, count = (int)step.num_tokens;
        int row = head * count;
        for (int block = first; block < blocks_ && block < first + at_once_; block++)
            product::multiply(w_, in_->prepared, row, row + count, head * blocks_ + block, [&](int m, const Floats* sums) {
                int at = block * weights::OUTPUTS, left = outputs_ - at;
                memcpy(to_.at(m - row, head) + at, sums, (left < weights::OUTPUTS ? left : weights::OUTPUTS) * sizeof(float));
            });
    }

  private:
    const Matrix w_;
    const int num_heads_;
    Buffer* in_;
    Buffer* out_;
    const int outputs_, num_threads_, blocks_;
    int at_once_ = 1, per_head_ = 1;
    Lines to_;
};

// Rows that the phases hand on, with a row for each head. All layers have the same.
struct Buffers {
    Buffer* inputs;    // of the product that absorbs
    Buffer* absorbed;  // [latent, rotary part]
    Buffer* attended;  // latents
    Buffer* summed;    // the same as inputs of the last product
};

// Calls add(phase) for all that is between queries and results [tokens, heads * value_dim].
template <class Add>
void add_phases(Buffer* queries, Buffer* out, const Buffers& rows, const Latents& l, attention::Scratches& scratches,
                int num_threads, Add add) {
    add(new Split(queries, rows.inputs, rows.absorbed, l));
    add(new HeadProducts(l.keys, l.num_heads, rows.inputs, rows.absorbed, l.rank, num_threads));
    auto* attention = new attention::Attention(rows.absorbed, rows.attended, layer_of(l), scratches);
    add(attention);
    add(new attention::Join(*attention, scratches));
    add(new layers::Prepare(rows.attended, nullptr, 0, rows.summed, layers::Prepare::PREPARE));
    add(new HeadProducts(l.values, l.num_heads, rows.summed, out, l.value_dim, num_threads));
}

// Latent attention of queries that the caller has, in memory for layers of one shape.
class Call final : public team::Work {
  public:
    Call(int num_threads, const Latents& l)
        : scratches_(num_threads), queries_(l.num_heads * (l.nope_dim + l.rope_dim), -1),
          inputs_(l.nope_dim, weights::input_form(l.keys->kind), l.num_heads), absorbed_(l.rank + l.rope_dim, -1, l.num_heads),
          attended_(l.rank, -1, l.num_heads), summed_(l.rank, weights::input_form(l.values->kind), l.num_heads),
          out_(l.num_heads * l.value_dim, -1) {}

    // step->output [tokens, heads * value_dim] of step->input [tokens, heads * (nope + rope)]. False: there is no memory.
    bool run(team::Team* team, const Latents& latents, const Step& step) {
        for (auto* buffer : {&queries_, &inputs_, &absorbed_, &attended_, &summed_, &out_})
            if (!buffer->reserve(step.num_tokens)) return false;
        phases_.clear();
        auto add = [&](Phase* phase) { phases_.emplace_back(phase); };
        add(new layers::Input(&queries_));
        add_phases(&queries_, &out_, {&inputs_, &absorbed_, &attended_, &summed_}, latents, scratches_, team::num_threads(team), add);
        add(new layers::Output(&out_));
        step_ = &step;
        chunks_.resize(phases_.size());
        for (size_t i = 0; i < phases_.size(); i++) chunks_[i] = phases_[i]->begin(step);
        team::run(team, this);
        return true;
    }

    int num_phases() const override { return (int)phases_.size(); }
    int num_chunks(int phase) const override { return chunks_[phase]; }
    void compute(int phase, int chunk, int thread) override { phases_[phase]->compute(*step_, chunk, thread); }

  private:
    attention::Scratches scratches_;
    Buffer queries_, inputs_, absorbed_, attended_, summed_, out_;
    std::vector<std::unique_ptr<Phase>> phases_;
    std::vector<int> chunks_;
    const Step* step_ = nullptr;
};

}  // namespace latent
