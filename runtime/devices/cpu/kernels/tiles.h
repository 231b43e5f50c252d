// Products by AMX: tiles of up to 16 rows of inputs times tiles of 16 outputs.
//
// Weights lie as the other AVX512 levels have them: a block's inputs in pairs (bfloat16) or fours (int8) for 32 outputs
// are the rows of two tiles of weights.
//
// TDPBF16PS sums the even and the odd inputs of a tile each by themselves, then both, then adds that to what is there
// (Intel's manual, volume 2): no other instruction has this order, so one row is computed by tiles as well as many are.
// Its cost is no concern: it takes less time than its weights take to come from memory. Sums of bytes are exact, and few
// rows of them are left to VNNI.
#pragma once

#include "amx.h"
#include "weights.h"

namespace tiles {

using namespace simd;
using weights::Matrix;
using weights::OUTPUTS;

constexpr int TILE_ROWS = 16, ROW_BYTES = 64;
constexpr int LEAST_ROWS_OF_INT8 = 4;

inline bool computes(const Matrix& w, int num_rows) {
    return HAS_TILES && (w.kind == weights::BFLOAT16 || (w.kind == weights::INT8 && num_rows >= LEAST_ROWS_OF_INT8));
}

#if defined(AMX_DOUBLE) || defined(__AMX_TILE__)

static_assert(OUTPUTS == 32 && LANES == 16, "a block of weights is two tiles wide");

// Registers 0 to 3 are sums [tile of rows][tile of outputs], 4 and 5 tiles of inputs, 6 and 7 of weights.
class Shape {
  public:
    explicit Shape(int num_rows) {
        amx::Config config;
        for (int tile = 0; tile < 8; tile++) {
            config.row_bytes[tile] = ROW_BYTES;
            config.rows[tile] = (uint8_t)(tile < 6 ? num_rows : TILE_ROWS);
        }
        amx::configure(config);  // each time: another library of the process may have tiles of its own
    }
    ~Shape() { amx::release(); }  // tiles in use make a switch of threads slower
    Shape(const Shape&) = delete;
};

template <bool IS_BYTES, int SUMS, int INPUTS, int WEIGHTS> inline void dot() {
    if constexpr (IS_BYTES) amx::dot_bytes<SUMS, INPUTS, WEIGHTS>();
    else amx::dot_bf16<SUMS, INPUTS, WEIGHTS>();
}

// Two tiles of rows, float32 or int32.
struct Sums {
    alignas(64) char tiles[2][TILE_ROWS][OUTPUTS * 4];
};

// Sums of the rows from `first`, and of those from `second` where that differs, with a block's weights.
template <bool IS_BYTES> inline void sum_tiles(const rows::Rows& x, int first, int second, const char* data, Sums& sums) {
    constexpr long WEIGHT_STRIDE = OUTPUTS * 4;
    const long stride = (long)x.width * (IS_BYTES ? 1 : 2);
    const char *inputs = rows::row_of(x, first), *others = rows::row_of(x, second);
    const bool has_second = second != first;
    amx::zero<0>();
    amx::zero<1>();
    amx::zero<2>();
    amx::zero<3>();
    for (long at = 0; at < stride; at += ROW_BYTES, data += TILE_ROWS * WEIGHT_STRIDE) {
        amx::load<4>(inputs + at, stride);
        amx::load<6>(data, WEIGHT_STRIDE);
        amx::load<7>(data + ROW_BYTES, WEIGHT_STRIDE);
        dot<IS_BYTES, 0, 4, 6>();
        dot<IS_BYTES, 1, 4, 7>();
        if (!has_second) continue;
        amx::load<5>(others + at, stride);
        dot<IS_BYTES, 2, 5, 6>();
        dot<IS_BYTES, 3, 5, 7>();
    }
    amx::store<0>(sums.tiles[0], WEIGHT_STRIDE);
    amx::store<1>(sums.tiles[0][0] + ROW_BYTES, WEIGHT_STRIDE);
    if (!has_second) return;
    amx::store<2>(sums.tiles[1], WEIGHT_STRIDE);
    amx::store<3>(sums.tiles[1][0] + ROW_BYTES, WEIGHT_STRIDE);
}

// Calls use(row, vectors) for rows begin..end and one block. The last tile has as many rows as the others, some of which
// the one before it has had as well.
template <class Use>
inline void multiply(const Matrix& w, const rows::Rows& x, int begin, int end, int block, Use use) {
    const int rows = end - begin < TILE_ROWS ? end - begin : TILE_ROWS;
    const char* data = w.data + (size_t)block * weights::block_bytes(w);
    const Shape shape(rows);
    Sums sums;
    for (int row = begin; row < end; row += 2 * rows) {
        const int first = row < end - rows ? row : end - rows;
        const int second = first + rows < end - rows ? first + rows : end - rows;
        if (w.kind == weights::INT8) sum_tiles<true>(x, first, second, data, sums);
        else sum_tiles<false>(x, first, second, data, sums);
        for (int m = row; m < row + 2 * rows && m < end; m++) {
            const char* of_row = m < first + rows ? sums.tiles[0][m - first] : sums.tiles[1][m - second];
            Floats out[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                out[v] = w.kind == weights::INT8 ? weights::scaled(w, block, v, load<Ints>(of_row + v * ROW_BYTES), x.scales[m])
                                                 : load<Floats>(of_row + v * ROW_BYTES);
            use(m, out);
        }
    }
}

#else

template <class Use> inline void multiply(const Matrix&, const rows::Rows&, int, int, int, Use) {}  // never called

#endif

}  // namespace tiles
