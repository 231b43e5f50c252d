// Products by arm64's matrix instructions (i8mm and bf16): two rows of inputs times two outputs, eight bytes of inputs at
// a time, so a sum has four numbers {row 0 output 0, row 0 output 1, row 1 output 0, row 1 output 1}.
//
// An odd row is multiplied as two equal ones: as many products in a cycle as the dot products of one row have, and the
// same order of sums as in company.
#pragma once

#include "weights.h"

namespace pairs {

using namespace simd;
using weights::Matrix;
using weights::OUTPUTS;

constexpr int HALVES = 2 * VECTORS;  // of a vector of outputs
constexpr int BYTES = 8;             // of a row's inputs in a step

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

// COUNT rows, the last one twice if they are odd.
template <int COUNT> struct RowPairs {
    static constexpr int PAIRS = (COUNT + 1) / 2;

    RowPairs(const rows::Rows& x, int row) {
        for (int m = 0; m < 2 * PAIRS; m++) inputs[m] = rows::row_of(x, row + (m < COUNT ? m : COUNT - 1));
    }

    explicit RowPairs(const char* const* all) {
        for (int m = 0; m < 2 * PAIRS; m++) inputs[m] = all[m < COUNT ? m : COUNT - 1];
    }

    Words load(int pair, int step) const {
        return (Words)vcombine_u8(vld1_u8((const uint8_t*)inputs[2 * pair] + step * BYTES),
                                  vld1_u8((const uint8_t*)inputs[2 * pair + 1] + step * BYTES));
    }

    const char* inputs[2 * PAIRS];
};

inline Ints dot(Ints total, Words inputs, Words weights) {
    return (Ints)vmmlaq_s32((int32x4_t)total, (int8x16_t)inputs, (int8x16_t)weights);
}

inline Floats dot(Floats total, Words inputs, Words weights) {
    return (Floats)vbfmmlaq_f32((float32x4_t)total, (bfloat16x8_t)inputs, (bfloat16x8_t)weights);
}

// Four outputs of a row from the sums of its pair.
template <class Sum> inline Sum row_of(const Sum* sums, int row) {
    auto a = (uint64x2_t)sums[0], b = (uint64x2_t)sums[1];
    return (Sum)(row % 2 ? vzip2q_u64(a, b) : vzip1q_u64(a, b));
}

// Sums of bfloat16 (Floats) or int8 (Ints).
template <int COUNT, class Sum>
inline void add(const rows::Rows& x, int row, const char* data, Sum (*total)[HALVES]) {
    const RowPairs<COUNT> pairs(x, row);
    const int steps = x.width * rows::bytes_of(x.form) / BYTES;
    for (int k = 0; k < steps; k++, data += OUTPUTS * BYTES) {
        for (int i = 0; i < OUTPUTS * BYTES; i += 64) __builtin_prefetch(data + 4096 + i, 0, 3);
        Words inputs[RowPairs<COUNT>::PAIRS];
        for (int p = 0; p < RowPairs<COUNT>::PAIRS; p++) inputs[p] = pairs.load(p, k);
#pragma GCC unroll 16
        for (int half = 0; half < HALVES; half++) {
            Words weights = load<Words>(data + half * LANES * 4);
#pragma GCC unroll 16
            for (int p = 0; p < RowPairs<COUNT>::PAIRS; p++) total[p][half] = dot(total[p][half], inputs[p], weights);
        }
    }
}

template <int COUNT>
inline void bf16_tile(const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    Floats total[RowPairs<COUNT>::PAIRS][HALVES] = {};
    add<COUNT>(x, row, data, total);
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = row_of(&total[m / 2][2 * v], m);
}

template <int COUNT>
inline void int8_tile(const Matrix& w, const rows::Rows& x, int row, int block, const char* data, Floats (*out)[VECTORS]) {
    Ints total[RowPairs<COUNT>::PAIRS][HALVES] = {};
    add<COUNT>(x, row, data, total);
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++)
            out[m][v] = weights::scaled(w, block, v, row_of(&total[m / 2][2 * v], m), x.scales[row + m]);
}

// As product::add_codes.
template <int COUNT>
inline void add_codes(const char* const* inputs, int at, const char* data, Ints (*sums)[VECTORS]) {
    const RowPairs<COUNT> pairs(inputs);
    Ints total[RowPairs<COUNT>::PAIRS][HALVES] = {};
#pragma GCC unroll 4
    for (int eight = 0; eight < rows::GROUP / BYTES; eight++, data += OUTPUTS * 4) {
        Words numbers[RowPairs<COUNT>::PAIRS];
        for (int p = 0; p < RowPairs<COUNT>::PAIRS; p++) numbers[p] = pairs.load(p, at * (rows::GROUP / BYTES) + eight);
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) {
            auto codes = load<uint32x4_t>(data + v * LANES * 4);
            auto low = codes & 0x0f0f0f0fu, high = codes >> 4 & 0x0f0f0f0fu;  // four inputs each
            auto first = (Words)vzip1q_u32(low, high), second = (Words)vzip2q_u32(low, high);
#pragma GCC unroll 16
            for (int p = 0; p < RowPairs<COUNT>::PAIRS; p++) {
                total[p][2 * v] = dot(total[p][2 * v], numbers[p], first);
                total[p][2 * v + 1] = dot(total[p][2 * v + 1], numbers[p], second);
            }
        }
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) sums[m][v] += row_of(&total[m / 2][2 * v], m);
}

#else

template <int COUNT> void bf16_tile(const rows::Rows&, int, const char*, Floats (*)[VECTORS]);
template <int COUNT> void int8_tile(const Matrix&, const rows::Rows&, int, int, const char*, Floats (*)[VECTORS]);
template <int COUNT> void add_codes(const char* const*, int, const char*, Ints (*)[VECTORS]);

#endif

}  // namespace pairs
