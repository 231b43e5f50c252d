// Products of rows of inputs with a block of packed weights.
//
// A tile is ROWS rows by one block of outputs and stays in registers while the inputs go by. The sum of an output runs
// over the inputs in one order whatever the number of rows, so a row's result does not depend on its company.
#pragma once

#include "float8.h"
#include "operands.h"
#include "pairs.h"
#include "product_ggml.h"
#include "tiles.h"
#include "weights.h"

namespace product {

using namespace simd;
using weights::Matrix;
using weights::OUTPUTS;

constexpr int ROW_PANEL = HAS_TILES ? 128 : 120;  // rows of a chunk at most: a multiple of all tiles' rows

// Floating-point weights, inputs in float32. `Read` makes a vector of weights from memory.
template <int COUNT, int BYTES, class Read>
inline void float_tile(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS], Read read) {
    const float* inputs[COUNT];
    for (int m = 0; m < COUNT; m++) inputs[m] = (const float*)rows::row_of(x, row + m);
    Floats total[COUNT][VECTORS] = {};
    for (int k = 0; k < w.width; k++, data += OUTPUTS * BYTES) {
        prefetch(data, OUTPUTS * BYTES);
        Floats numbers[VECTORS];
        for (int v = 0; v < VECTORS; v++) numbers[v] = read(data + v * LANES * BYTES);
#pragma GCC unroll 16
        for (int m = 0; m < COUNT; m++)
            for (int v = 0; v < VECTORS; v++) total[m][v] += broadcast(inputs[m][k]) * numbers[v];
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = total[m][v];
}

template <int COUNT>
inline void bf16_tile(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    const char* inputs[COUNT];
    for (int m = 0; m < COUNT; m++) inputs[m] = rows::row_of(x, row + m);
    Floats total[COUNT][VECTORS] = {};
    for (int k = 0; k < w.width / 2; k++, data += OUTPUTS * 4) {
        prefetch(data, OUTPUTS * 4);
        Words pairs[VECTORS];
        for (int v = 0; v < VECTORS; v++) pairs[v] = load<Words>(data + v * LANES * 4);
        if constexpr (HAS_BF16_DOT) {
#pragma GCC unroll 16
            for (int m = 0; m < COUNT; m++) {
                Words pair = word_at(inputs[m], k);
                for (int v = 0; v < VECTORS; v++) total[m][v] = dot_bf16(total[m][v], pair, pairs[v]);
            }
        } else {
            // one half after the other: registers hold the totals, VECTORS weights and one input
            for (int half = 0; half < 2; half++) {
                Floats numbers[VECTORS];
                for (int v = 0; v < VECTORS; v++) numbers[v] = half ? high_bf16(pairs[v]) : low_bf16(pairs[v]);
#pragma GCC unroll 16
                for (int m = 0; m < COUNT; m++)
                    for (int v = 0; v < VECTORS; v++)
                        total[m][v] += broadcast(((const float*)inputs[m])[2 * k + half]) * numbers[v];
            }
        }
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = total[m][v];
}

template <int COUNT>
inline void int8_tile(const Matrix& w, const rows::Rows& x, int row, int block, const char* data, Floats (*out)[VECTORS]) {
    const char* inputs[COUNT];
    for (int m = 0; m < COUNT; m++) inputs[m] = rows::row_of(x, row + m);
    Ints total[COUNT][VECTORS] = {};
    for (int k = 0; k < w.width / 4; k++, data += OUTPUTS * 4) {
        prefetch(data, OUTPUTS * 4);
        Words bytes[VECTORS];
        for (int v = 0; v < VECTORS; v++) bytes[v] = load<Words>(data + v * LANES * 4);
#pragma GCC unroll 16
        for (int m = 0; m < COUNT; m++) {
            Words four = word_at(inputs[m], k);
            for (int v = 0; v < VECTORS; v++) total[m][v] = dot_int8(total[m][v], four, bytes[v]);
        }
    }
    for (int v = 0; v < VECTORS; v++)
        for (int m = 0; m < COUNT; m++) out[m][v] = weights::scaled(w, block, v, total[m][v], x.scales[row + m]);
}

// Adds the products of 32 inputs with their codes, [32 / 8][output][4] bytes. `at`: which 32.
template <int COUNT>
inline void add_codes(const char* const* inputs, int at, const char* data, Ints (*sums)[VECTORS]) {
    if constexpr (HAS_PAIRS) return pairs::add_codes<COUNT>(inputs, at, data, sums);
    static_assert(words_of_partial(15) >= rows::GROUP / 4);
    Partial parts[COUNT][VECTORS];
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) parts[m][v] = begin_partial(sums[m][v]);
#pragma GCC unroll 4
    for (int eight = 0; eight < rows::GROUP / 8; eight++, data += OUTPUTS * 4) {
        Words low[VECTORS], high[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            Words halves = load<Words>(data + v * LANES * 4);
            low[v] = halves & 0x0f0f0f0fu;
            high[v] = halves >> 4 & 0x0f0f0f0fu;
        }
#pragma GCC unroll 16
        for (int m = 0; m < COUNT; m++) {
            int word = at * (rows::GROUP / 4) + eight * 2;
            Words first = word_at(inputs[m], word), second = word_at(inputs[m], word + 1);
            for (int v = 0; v < VECTORS; v++)
                parts[m][v] = add_partial(add_partial(parts[m][v], low[v], first), high[v], second);
        }
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) sums[m][v] = end_partial(sums[m][v], parts[m][v]);
}

// Sums are integers within 32 inputs, float32 from one 32 to the next within a group of weights, and from group to group.
// `open` reads what a group begins with, HEAD_BYTES for each output; its begin() says from the sum of 32 inputs what the
// zero points take away.
template <int COUNT, int HEAD_BYTES, class Open>
inline void grouped_tile(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS], Open open) {
    const char* inputs[COUNT];
    for (int m = 0; m < COUNT; m++) inputs[m] = rows::row_of(x, row + m);
    size_t per_row = x.width / rows::GROUP;
    const float* input_scales = x.scales + row * per_row;
    const int32_t* input_sums = x.sums + row * per_row;
    Floats total[COUNT][VECTORS] = {};
    int at = 0;  // groups of inputs
    for (int g = 0; g < w.width / w.group; g++) {
        auto group = open(data);
        prefetch(data, OUTPUTS * HEAD_BYTES);
        data += OUTPUTS * HEAD_BYTES;
        Floats parts[COUNT][VECTORS] = {};  // without the scales of the weights
        for (int end = at + w.group / rows::GROUP; at < end; at++, data += OUTPUTS * rows::GROUP / 2) {
            prefetch(data, OUTPUTS * rows::GROUP / 2);
            Ints sums[COUNT][VECTORS];
            for (int m = 0; m < COUNT; m++) {
                Ints of_inputs = broadcast(input_sums[m * per_row + at]);
                for (int v = 0; v < VECTORS; v++) sums[m][v] = group.begin(of_inputs, v);
            }
            add_codes<COUNT>(inputs, at, data, sums);
            for (int m = 0; m < COUNT; m++) {
                Floats scale = broadcast(input_scales[m * per_row + at]);
                for (int v = 0; v < VECTORS; v++) parts[m][v] += scale * floats(sums[m][v]);
            }
        }
        for (int m = 0; m < COUNT; m++)
            for (int v = 0; v < VECTORS; v++) total[m][v] += group.scales[v] * parts[m][v];
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = total[m][v];
}

struct GroupAround8 {
    Floats scales[VECTORS];
    Ints begin(Ints of_inputs, int) const { return of_inputs; }
};

template <int COUNT>
inline void int4_tile(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    grouped_tile<COUNT, 2>(w, x, row, data, out, [](const char* at) {
        GroupAround8 group;
        for (int v = 0; v < VECTORS; v++) group.scales[v] = load_f16((const uint16_t*)at + v * LANES);
        return group;
    });
}

struct GroupWithZeros {
    Floats scales[VECTORS];
    Ints zeros[VECTORS];
    Ints begin(Ints of_inputs, int v) const { return multiply_small(zeros[v], of_inputs) >> 3; }
};

template <int COUNT>
inline void int4_zeros_tile(const Matrix& w, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    grouped_tile<COUNT, 5>(w, x, row, data, out, [](const char* at) {
        GroupWithZeros group;
        for (int v = 0; v < VECTORS; v++) {
            group.scales[v] = load<Floats>(at + v * LANES * 4);
            group.zeros[v] = load_bytes((const uint8_t*)at + OUTPUTS * 4 + v * LANES);
        }
        return group;
    });
}

template <int COUNT>
inline void tile(const Matrix& w, const rows::Rows& x, int row, int block, Floats (*out)[VECTORS]) {
    const char* data = w.data + (size_t)block * weights::block_bytes(w);
    switch (w.kind) {
        case weights::FLOAT32:
            return float_tile<COUNT, 4>(w, x, row, data, out, [](const char* at) { return load<Floats>(at); });
        case weights::FLOAT16:
            return float_tile<COUNT, 2>(w, x, row, data, out, [](const char* at) { return load_f16((const uint16_t*)at); });
        case weights::BFLOAT16:
            if constexpr (HAS_PAIRS) return pairs::bf16_tile<COUNT>(x, row, data, out);
            else return bf16_tile<COUNT>(w, x, row, data, out);
        case weights::INT8:
            if constexpr (HAS_PAIRS) return pairs::int8_tile<COUNT>(w, x, row, block, data, out);
            else if constexpr (COUNT <= BYTE_ROWS) int8_tile<COUNT>(w, x, row, block, data, out);
            return;
        case weights::INT4:
            if constexpr (COUNT <= GROUPED_ROWS) int4_tile<COUNT>(w, x, row, data, out);
            return;
        case weights::FLOAT8:
            if constexpr (COUNT <= BYTE_ROWS) float8::tile<COUNT>(w, x, row, data, out);
            return;
        case weights::MXFP4:
            if constexpr (COUNT <= BYTE_ROWS) float8::mxfp4_tile<COUNT>(w, x, row, data, out);
            return;
        case weights::INT4_ZEROS:
            if constexpr (COUNT <= GROUPED_ROWS) int4_zeros_tile<COUNT>(w, x, row, data, out);
            return;
        default:
            if constexpr (COUNT <= GGML_ROWS)
                weights::with_type(w.kind, [&](auto type) { ggml_tile<decltype(type), COUNT>(w.width, x, row, data, out); });
            return;
    }
}

template <int COUNT = ROWS>
inline void tile_of(int count, const Matrix& w, const rows::Rows& x, int row, int block, Floats (*out)[VECTORS]) {
    if (count == COUNT) return tile<COUNT>(w, x, row, block, out);
    if constexpr (COUNT > 1) tile_of<COUNT - 1>(count, w, x, row, block, out);
}

inline int rows_of_tile(const Matrix& w) {
    if (weights::is_ggml(w.kind)) return GGML_ROWS;
    if (weights::is_int4(w.kind)) return GROUPED_ROWS;
    return w.kind == weights::INT8 || weights::is_float8(w.kind) ? BYTE_ROWS : ROWS;
}

// Rows of the next tile of `left` rows, of tiles that are as equal as can be with at most `most` rows.
inline int next_rows(int left, int most) {
    int num_tiles = (left + most - 1) / most;
    return (left + num_tiles - 1) / num_tiles;
}

// Whether weights are unpacked once for all rows (float8::panels).
inline bool has_panels(const Matrix& w) { return !HAS_BF16_DOT && weights::is_float8(w.kind); }

// Rows for which the results of two blocks are kept, until they are multiplied.
inline int rows_of_pair(const Matrix& w) {
    if (has_panels(w)) return float8::PANEL_ROWS;
    return HAS_TILES && (w.kind == weights::BFLOAT16 || w.kind == weights::INT8) ? ROW_PANEL : rows_of_tile(w);
}

constexpr int MOST_ROWS_OF_PAIR = ROW_PANEL;
static_assert(MOST_ROWS_OF_PAIR >= float8::PANEL_ROWS);

// `multiply` of weights that are unpacked once for all rows.
template <class Use>
__attribute__((noinline)) void multiply_panels(const Matrix& w, const rows::Rows& x, int begin, int end, int block, Use use) {
    const char* data = w.data + (size_t)block * weights::block_bytes(w);
    for (int row = begin, count; row < end; row += count) {
        count = next_rows(end - row, float8::PANEL_ROWS);
        Floats out[float8::PANEL_ROWS][VECTORS];
        float8::panels(w, x, row, count, data, out);
        for (int m = 0; m < count; m++) use(row + m, out[m]);
    }
}

// Calls use(row, block, vectors) for rows begin..end and one block: `vectors` are its OUTPUTS outputs of that row.
template <class Use> inline void multiply(const Matrix& whole, const rows::Rows& x, int begin, int end, int block, Use use) {
    int in_part = block;
    const Matrix& w = weights::part_of(whole, &in_part);
    if constexpr (HAS_TILES)
        if (tiles::computes(w, end - begin)) return tiles::multiply(w, x, begin, end, in_part, use);
    if constexpr (!HAS_BF16_DOT)
        if (has_panels(w) && end - begin > BYTE_ROWS) return multiply_panels(w, x, begin, end, in_part, use);
    for (int row = begin, count; row < end; row += count) {
        count = next_rows(end - row, rows_of_tile(w));
        Floats out[ROWS][VECTORS];
        tile_of(count, w, x, row, in_part, out);
        for (int m = 0; m < count; m++) use(row + m, out[m]);
    }
}

}  // namespace product
