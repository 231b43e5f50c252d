// The tiles of amx.h in C++, as Intel's manual has them (Software Developer's Manual, volume 2: LDTILECFG, TILELOADD,
// TILESTORED, TDPBF16PS, TDPBUSD), with its faults: what a processor would not do ends the process. A build for tests
// includes it in place of the instructions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx {

struct Tile {
    uint8_t bytes[16][64];
};

struct State {  // of a thread
    bool is_configured = false;
    Config config;
    Tile tiles[8];
};

inline thread_local State state;

inline void require(bool holds, const char* fault) {
    if (holds) return;
    fprintf(stderr, "AMX: %s\n", fault);
    abort();
}

inline int rows_of(int tile) {
    require(state.is_configured, "#UD, tiles are not configured");
    require(state.config.rows[tile] > 0 && state.config.row_bytes[tile] > 0, "#UD, a tile without a shape");
    return state.config.rows[tile];
}

inline int row_bytes_of(int tile) { return rows_of(tile), state.config.row_bytes[tile]; }

inline void configure(const Config& config) {
    require(config.palette == 1, "#GP, a palette other than 1");
    for (uint8_t byte : config.reserved) require(byte == 0, "#GP, reserved bytes");
    for (int tile = 0; tile < 16; tile++) {
        int rows = config.rows[tile], bytes = config.row_bytes[tile];
        require(tile < 8 || (rows == 0 && bytes == 0), "#GP, more than 8 tiles");
        require(rows <= 16 && bytes <= 64, "#GP, a tile of more than 16 rows of 64 bytes");
        require((rows == 0) == (bytes == 0), "#GP, rows without bytes or bytes without rows");
    }
    state = State{true, config, {}};
}

inline void release() { state = State{}; }

template <int TILE> inline void zero() {
    rows_of(TILE);
    state.tiles[TILE] = Tile{};
}

template <int TILE> inline void load(const void* from, long stride) {
    Tile tile{};  // what is outside of the shape becomes zero
    for (int row = 0; row < rows_of(TILE); row++)
        memcpy(tile.bytes[row], (const char*)from + row * stride, (size_t)row_bytes_of(TILE));
    state.tiles[TILE] = tile;
}

template <int TILE> inline void store(void* to, long stride) {
    for (int row = 0; row < rows_of(TILE); row++)
        memcpy((char*)to + row * stride, state.tiles[TILE].bytes[row], (size_t)row_bytes_of(TILE));
}

template <int SUMS, int INPUTS, int WEIGHTS> inline void check_shapes() {
    static_assert(SUMS != INPUTS && INPUTS != WEIGHTS && SUMS != WEIGHTS, "#UD: one tile twice");
    require(rows_of(SUMS) == rows_of(INPUTS), "#UD, rows of sums and of inputs differ");
    require(row_bytes_of(SUMS) == row_bytes_of(WEIGHTS), "#UD, columns of sums and of weights differ");
    require(row_bytes_of(INPUTS) == 4 * rows_of(WEIGHTS), "#UD, columns of inputs are not rows of weights");
    require(row_bytes_of(SUMS) % 4 == 0 && row_bytes_of(INPUTS) % 4 == 0, "#UD, rows that are not of 4 bytes each");
}

// Denormal numbers are zero, as inputs and as results.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float number(const Tile& tile, int row, int index) {  // a bfloat16
    uint16_t half;
    memcpy(&half, tile.bytes[row] + 2 * index, 2);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return flushed(value);
}

// One operation with one rounding, to nearest even. A product of two bfloat16 is exact in float64; its sum with a float32
// is fused.
inline float fused(float a, float b, float c) { return flushed(fmaf(a, b, flushed(c))); }

// A compiler that contracts a * b + c does not change this: there is no product that is rounded by itself.
template <int SUMS, int INPUTS, int WEIGHTS> inline void dot_bf16() {
    check_shapes<SUMS, INPUTS, WEIGHTS>();
    const Tile &inputs = state.tiles[INPUTS], &weights = state.tiles[WEIGHTS];
    for (int m = 0; m < rows_of(SUMS); m++)
        for (int n = 0; n < row_bytes_of(SUMS) / 4; n++) {
            float even = 0, odd = 0, total;
            for (int k = 0; k < row_bytes_of(INPUTS) / 4; k++) {
                even = fused(number(inputs, m, 2 * k), number(weights, k, 2 * n), even);
                odd = fused(number(inputs, m, 2 * k + 1), number(weights, k, 2 * n + 1), odd);
            }
            memcpy(&total, state.tiles[SUMS].bytes[m] + 4 * n, 4);
            total = flushed(flushed(total) + flushed(even + odd));
            memcpy(state.tiles[SUMS].bytes[m] + 4 * n, &total, 4);
        }
}

template <int SUMS, int INPUTS, int WEIGHTS> inline void dot_bytes() {
    check_shapes<SUMS, INPUTS, WEIGHTS>();
    for (int m = 0; m < rows_of(SUMS); m++)
        for (int n = 0; n < row_bytes_of(SUMS) / 4; n++) {
            int32_t total;
            memcpy(&total, state.tiles[SUMS].bytes[m] + 4 * n, 4);
            for (int i = 0; i < row_bytes_of(INPUTS); i++)
                total += state.tiles[INPUTS].bytes[m][i] * (int8_t)state.tiles[WEIGHTS].bytes[i / 4][4 * n + i % 4];
            memcpy(state.tiles[SUMS].bytes[m] + 4 * n, &total, 4);
        }
}

}  // namespace amx
