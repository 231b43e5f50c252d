// What LoRA adapters (Hu et al., 2021) add to a product: for each token that has one, out += B (A in).
#pragma once

#include "layers.h"

namespace lora {

using namespace simd;
using step::Buffer;
using step::Number;
using step::Phase;
using step::Step;

constexpr int MAX_INNER = 2048;  // parts times rank
constexpr int MAX_PARTS = 8;

// The adapters' weights of one layer, for all LoRA slots. Python fills it (library.py has the same fields).
struct Weights {
    const char* a;  // [slots, parts, rank, inputs]
    const char* b;  // [slots, columns of all parts, rank]
    Number kind;    // of both
    int num_parts, rank, inputs, columns;
    int offsets[MAX_PARTS];  // of each part: its first column in the layer's output
    int sizes[MAX_PARTS];    // and its columns
};

// The dot product of `count` floats with numbers of a table, in an order that `count` alone decides.
inline float dot(const float* x, const char* numbers, Number kind, int count) {
    int bytes = step::bytes_of(kind), at = 0;
    Floats total{};
    for (; at + LANES <= count; at += LANES)
        total += load<Floats>(x + at) * step::load_number(numbers + (size_t)at * bytes, kind);
    if (at < count) {
        char last[LANES * 4] = {};
        Floats inputs{};
        memcpy(last, numbers + (size_t)at * bytes, (size_t)(count - at) * bytes);
        memcpy(&inputs, x + at, (count - at) * sizeof(float));
        total += inputs * step::load_number(last, kind);
    }
    return sum(total);
}

// A chunk for each token. `in` holds the product's inputs before their norm, which is computed again here: products
// keep it only in the form that they multiply.
class Lora final : public Phase {
  public:
    Lora(Buffer* in, const float* norm, float eps, const Weights& weights, Buffer* out)
        : in_(in), norm_(norm), eps_(eps), w_(weights), out_(out) {}

    int begin(const Step& step) override { return step.lora_slots ? (int)step.num_tokens : 0; }

    void compute(const Step& step, int chunk, int) override {
        int64_t slot = step.lora_slots[chunk];
        if (slot < 0) return;
        const float* x = in_->row(chunk);
        float normed[layers::Prepare::MAX_WIDTH] __attribute__((aligned(64)));
        if (norm_) {
            layers::rms_norm(x, norm_, eps_, in_->width, normed);
            x = normed;
        }
        float inner[MAX_INNER];
        int bytes = step::bytes_of(w_.kind), count = w_.num_parts * w_.rank;
        const char* a = w_.a + (size_t)slot * count * w_.inputs * bytes;
        for (int i = 0; i < count; i++) inner[i] = dot(x, a + (size_t)i * w_.inputs * bytes, w_.kind, w_.inputs);
        const char* b = w_.b + (size_t)slot * w_.columns * w_.rank * bytes;
        for (int part = 0; part < w_.num_parts; part++) {
            float* to = out_->row(chunk) + w_.offsets[part];
            for (int i = 0; i < w_.sizes[part]; i++, b += (size_t)w_.rank * bytes)
                to[i] += dot(inner + part * w_.rank, b, w_.kind, w_.rank);
        }
    }

  private:
    Buffer* in_;
    const float* norm_;
    float eps_;
    const Weights w_;
    Buffer* out_;
};

}  // namespace lora
