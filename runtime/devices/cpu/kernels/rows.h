// Inputs of products: rows of activations in the form that a kind of weight is multiplied with.
//
//   FLOAT32   as they are                                         for float32, float16 (and bfloat16 without its dot product)
//   BFLOAT16  rounded to nearest even                             for bfloat16 weights, where the CPU multiplies its pairs
//   INT8      round(x / scale), scale = max|x| / 127 of the row   for int8 weights
//   GROUPED   the same for each GROUP inputs, with their sums     for 4-bit weights
//             times -8, within 16 bits: what most zero points take away
//   HALVED    the same, with the sums of each half of a GROUP     for ggml's types
#pragma once

#include "simd.h"

namespace rows {

using namespace simd;

enum Form { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, GROUPED = 3, HALVED = 4 };

constexpr int GROUP = 32;  // inputs that share a scale in GROUPED
constexpr float TINY = 1e-12f;  // the least scale: a row of zeros has one as well

// Rows of `width` numbers, a multiple of 64, zeros behind the last input.
struct Rows {
    Form form;
    int width;
    void* numbers;   // [rows, width] float, bfloat16 or int8
    float* scales;   // INT8: [rows], GROUPED, HALVED: [rows, width / GROUP]
    int32_t* sums;   // GROUPED: [rows, width / GROUP], HALVED: twice as many
};

inline bool is_grouped(Form form) { return form == GROUPED || form == HALVED; }

inline int bytes_of(Form form) { return form == FLOAT32 ? 4 : form == BFLOAT16 ? 2 : 1; }

inline const char* row_of(const Rows& rows, int row) {
    return (const char*)rows.numbers + (size_t)row * rows.width * bytes_of(rows.form);
}

inline void quantize_row(const float* x, const Rows& out, int row) {
    auto* numbers = (int8_t*)out.numbers + (size_t)row * out.width;
    Floats most{};
    for (int i = 0; i < out.width; i += LANES) most = max(most, absolute(load<Floats>(x + i)));
    float scale = largest(most) / 127.0f;
    if (scale < TINY) scale = TINY;
    out.scales[row] = scale;
    for (int i = 0; i < out.width; i += LANES)
        store_bytes(numbers + i, rounded(load<Floats>(x + i) / broadcast(scale)) + INPUT_OFFSET);
}

inline void quantize_groups(const float* x, const Rows& out, int row) {
    auto* numbers = (int8_t*)out.numbers + (size_t)row * out.width;
    size_t first = (size_t)row * (out.width / GROUP);
    for (int group = 0; group < out.width / GROUP; group++, x += GROUP, numbers += GROUP) {
        Floats most{};
        for (int i = 0; i < GROUP; i += LANES) most = max(most, absolute(load<Floats>(x + i)));
        float scale = largest(most) / 127.0f;
        if (scale < TINY) scale = TINY;
        int32_t halves[2] = {};
        for (int i = 0; i < GROUP; i += LANES) {
            Ints codes = rounded(load<Floats>(x + i) / broadcast(scale));
            halves[i / (GROUP / 2)] += sum(codes);
            store_bytes(numbers + i, codes);
        }
        out.scales[first + group] = scale;
        if (out.form == GROUPED) out.sums[first + group] = -8 * (halves[0] + halves[1]);
        else memcpy(out.sums + 2 * (first + group), halves, sizeof halves);
    }
}

// Row `row` of `out` from x [out.width], zeros behind its last input.
inline void prepare_row(const float* x, const Rows& out, int row) {
    if (out.form == INT8) return quantize_row(x, out, row);
    if (is_grouped(out.form)) return quantize_groups(x, out, row);
    char* to = (char*)row_of(out, row);
    if (out.form == FLOAT32) {
        memcpy(to, x, (size_t)out.width * 4);
        return;
    }
    for (int i = 0; i < out.width; i += LANES) store_bf16_input((uint16_t*)to + i, load<Floats>(x + i));
}

}  // namespace rows
