// Weights that are floats of 8 and 4 bits, with scales for groups of inputs:
//
//   FLOAT8   [block][group of inputs]: float32 scales [output], then [group / T][output][T] numbers of 8 bits (e4m3); T is
//            FLOAT8_TOGETHER, and where it is 1 the scales are those of the weights times 2^8
//   MXFP4    [block][32 inputs]: exponents of the scales uint8 [output] (e8m0), then [8 inputs][output] words of 32 bits,
//            numbers of 4 bits (e2m1): in the lower half inputs 0, 2, 4, 6 of eight, in the upper half the others
//
// Numbers are multiplied as they are, in bfloat16 or float32, and sums of groups with the scales: weights lose nothing.
// Open Compute Project, 8-bit Floating Point (2023) and Microscaling Formats (2023).
#pragma once

#include "weights.h"

namespace float8 {

using namespace simd;
using weights::Matrix;
using weights::OUTPUTS;

constexpr int PREFETCH = 4096;  // bytes ahead of the weights in use

inline void prefetch(const char* at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + PREFETCH + i, 0, 3);
}

// A power of two from its exponent. 2^-127, which no weight needs, is 0.
inline Floats load_exponents(const uint8_t* at) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    return (Floats)(__builtin_convertvector(load<Bytes>(at), Words) << 23);
}

// One pair of inputs for COUNT rows.
template <int COUNT> struct Sums {
    Floats sums[COUNT][VECTORS] = {};

    void add_pairs(const char* const* inputs, int pair, const Words* weights) {
#pragma GCC unroll 16
        for (int m = 0; m < COUNT; m++) {
            Words two = broadcast(load<uint32_t>(inputs[m] + (size_t)pair * 4));
            for (int v = 0; v < VECTORS; v++) sums[m][v] = dot_bf16(sums[m][v], two, weights[v]);
        }
    }

    void add(const char* const* inputs, int input, const Floats* weights) {
#pragma GCC unroll 16
        for (int m = 0; m < COUNT; m++) {
            Floats one = broadcast(load<float>(inputs[m] + (size_t)input * 4));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[m][v] += one * weights[v];
        }
    }
};

// The loop over groups of both kinds. `add(sums, inputs, pair, data)` adds the products of STEP pairs of inputs, whose
// numbers are OUTPUTS * STEP * BYTES.
template <int COUNT, int STEP, int STEP_BYTES, int HEAD_BYTES, class Scales, class Add>
inline void grouped(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS],
                    Scales scales_at, Add add) {
    const char* inputs[COUNT];
    for (int m = 0; m < COUNT; m++) inputs[m] = rows::row_of(x, row + m);
    Floats total[COUNT][VECTORS] = {};
    for (int pair = 0; pair < w.width / 2;) {
        Floats scales[VECTORS];
        for (int v = 0; v < VECTORS; v++) scales[v] = scales_at(data + v * LANES * HEAD_BYTES);
        data += OUTPUTS * HEAD_BYTES;
        Sums<COUNT> part;
        for (int end = pair + w.group / 2; pair < end; pair += STEP, data += OUTPUTS * STEP_BYTES) {
            prefetch(data, OUTPUTS * STEP_BYTES);
            add(part, inputs, pair, data);
        }
        for (int m = 0; m < COUNT; m++)
            for (int v = 0; v < VECTORS; v++) total[m][v] += scales[v] * part.sums[m][v];
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = total[m][v];
}

template <int COUNT>
inline void tile(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    auto scales_at = [](const char* at) { return load<Floats>(at); };
    grouped<COUNT, 1, 2, 4>(w, x, row, data, out, scales_at, [](Sums<COUNT>& sums, const char* const* inputs, int pair, const char* at) {
        if constexpr (HAS_BF16_DOT) {
            Words pairs[VECTORS];
            for (int v = 0; v < VECTORS; v++) pairs[v] = load_float8_pairs(at + v * LANES * 2);
            sums.add_pairs(inputs, pair, pairs);
        } else {
            for (int i = 0; i < 2; i++) {
                Floats numbers[VECTORS];
                for (int v = 0; v < VECTORS; v++) numbers[v] = load_float8(at + i * OUTPUTS + v * LANES);
                sums.add(inputs, 2 * pair + i, numbers);
            }
        }
    });
}

template <int COUNT>
inline void mxfp4_tile(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    auto scales_at = [](const char* at) { return load_exponents((const uint8_t*)at); };
    grouped<COUNT, 4, 4, 1>(w, x, row, data, out, scales_at, [](Sums<COUNT>& sums, const char* const* inputs, int pair, const char* at) {
        Words codes[VECTORS];
        for (int v = 0; v < VECTORS; v++) codes[v] = load<Words>(at + v * LANES * 4);
        for (int i = 0; i < 4; i++) {
            if constexpr (HAS_BF16_DOT) {
                Words pairs[VECTORS];
                for (int v = 0; v < VECTORS; v++) pairs[v] = float4_pairs(codes[v] >> (4 * i));
                sums.add_pairs(inputs, pair + i, pairs);
            } else {
                for (int half = 0; half < 2; half++) {
                    Floats numbers[VECTORS];
                    for (int v = 0; v < VECTORS; v++) numbers[v] = bottom_float4(codes[v] >> (4 * i + 16 * half));
                    sums.add(inputs, 2 * (pair + i) + half, numbers);
                }
            }
        }
    });
}

constexpr int PANEL = 64;         // inputs that are unpacked together at most
constexpr int PANEL_ROWS = 120;   // rows that one unpacking serves at most: a multiple of ROWS

// Inputs begin..begin + count of a group as float32: numbers[input][vector]. `data`: the group's codes.
inline void unpack(const Matrix& w, const char* data, int begin, int count, Floats (*numbers)[VECTORS]) {
    if (w.kind == weights::FLOAT8) {
        data += (size_t)begin * OUTPUTS;
        prefetch(data, count * OUTPUTS);
        for (int k = 0; k < count; k++)
            for (int v = 0; v < VECTORS; v++) numbers[k][v] = load_float8(data + k * OUTPUTS + v * LANES);
        return;
    }
    data += (size_t)begin / 2 * OUTPUTS;
    prefetch(data, count / 2 * OUTPUTS);
    for (int eight = 0; eight < count; eight += 8, data += OUTPUTS * 4)
        for (int v = 0; v < VECTORS; v++) {
            Words codes = load<Words>(data + v * LANES * 4);
            for (int k = 0; k < 8; k++) numbers[eight + k][v] = bottom_float4(codes >> (k / 2 * 4 + k % 2 * 16));
        }
}

// Adds the products of `count` inputs of COUNT rows to their sums.
template <int COUNT>
inline void add_panel(const rows::Rows& x, int row, int input, int count, const Floats (*numbers)[VECTORS], Floats (*sums)[VECTORS]) {
    const float* inputs[COUNT];
    Sums<COUNT> part;
    for (int m = 0; m < COUNT; m++) {
        inputs[m] = (const float*)rows::row_of(x, row + m) + input;
        for (int v = 0; v < VECTORS; v++) part.sums[m][v] = sums[m][v];
    }
    for (int k = 0; k < count; k++) {
        Floats weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weights[v] = numbers[k][v];
        part.add((const char* const*)inputs, k, weights);
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) sums[m][v] = part.sums[m][v];
}

template <int COUNT = ROWS>
inline void add_panel_of(int rows, const rows::Rows& x, int row, int input, int count, const Floats (*numbers)[VECTORS],
                         Floats (*sums)[VECTORS]) {
    if (rows == COUNT) return add_panel<COUNT>(x, row, input, count, numbers, sums);
    if constexpr (COUNT > 1) add_panel_of<COUNT - 1>(rows, x, row, input, count, numbers, sums);
}

// At most PANEL_ROWS rows by one block, without dot products of bfloat16: the weights are unpacked once for all rows.
// Sums have the order of `grouped`, and so the same bits.
inline void panels(const Matrix& w, const rows::Rows& x, int row, int num_rows, const char* data, Floats (*out)[VECTORS]) {
    Floats sums[PANEL_ROWS][VECTORS], numbers[PANEL][VECTORS], scales[VECTORS];
    bool is_float4 = w.kind == weights::MXFP4;
    int at_once = w.group < PANEL ? w.group : PANEL;
    for (int m = 0; m < num_rows; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = Floats{};
    for (int input = 0; input < w.width; input += w.group, data += weights::group_bytes(w)) {
        for (int v = 0; v < VECTORS; v++)
            scales[v] = is_float4 ? load_exponents((const uint8_t*)data + v * LANES) : load<Floats>(data + v * LANES * 4);
        for (int m = 0; m < num_rows; m++)
            for (int v = 0; v < VECTORS; v++) sums[m][v] = Floats{};
        for (int k = 0; k < w.group; k += at_once) {
            unpack(w, data + OUTPUTS * (is_float4 ? 1 : 4), k, at_once, numbers);
            for (int m = 0, count; m < num_rows; m += count) {
                int tiles = (num_rows - m + ROWS - 1) / ROWS;
                count = (num_rows - m + tiles - 1) / tiles;
                add_panel_of(count, x, row + m, input + k, at_once, numbers, sums + m);
            }
        }
        for (int m = 0; m < num_rows; m++)
            for (int v = 0; v < VECTORS; v++) out[m][v] += scales[v] * sums[m][v];
    }
}

// One block. FLOAT8: codes [outputs, inputs] and scales float32 [outputs, groups]. MXFP4: codes [outputs, inputs / 2],
// the first of two in the lower half, and scales uint8 [outputs, groups].
inline void pack_block(const Matrix& w, const uint8_t* codes, const void* scales, int block, char* to) {
    int given = (w.inputs + w.group - 1) / w.group;
    bool is_float4 = w.kind == weights::MXFP4;
    int head = OUTPUTS * (is_float4 ? 1 : 4);
    memset(to, 0, weights::block_bytes(w));
    for (int g = 0; g < given; g++, to += weights::group_bytes(w)) {
        for (int i = 0; i < OUTPUTS && block * OUTPUTS + i < w.outputs; i++) {
            size_t output = (size_t)block * OUTPUTS + i;
            if (is_float4) to[i] = ((const char*)scales)[output * given + g];
            else ((float*)to)[i] = ((const float*)scales)[output * given + g] * (FLOAT8_TOGETHER == 1 ? 256.0f : 1.0f);
            for (int k = 0; k < w.group && g * w.group + k < w.inputs; k++) {
                size_t input = (size_t)g * w.group + k;
                if (is_float4) {
                    uint32_t code = codes[output * (w.inputs / 2) + input / 2] >> (input % 2 * 4) & 15, word;
                    char* place = to + head + ((size_t)(k / 8) * OUTPUTS + i) * 4;
                    memcpy(&word, place, 4);
                    word |= code << (k % 8 / 2 * 4 + k % 2 * 16);
                    memcpy(place, &word, 4);
                } else {
                    to[head + weights::place(FLOAT8_TOGETHER, i, k)] = (char)codes[output * w.inputs + input];
                }
            }
        }
    }
}

}  // namespace float8
