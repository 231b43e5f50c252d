// AMX: eight registers that are tiles of 16 rows by 64 bytes, and products of tiles.
//
// A file of tests has the same functions in C++, for machines without AMX. An operating system gives tiles to processes
// that ask for them: levels.py does.
#pragma once

#include <cstdint>

namespace amx {

struct alignas(64) Config {  // of LDTILECFG: palette 1, and the shape of each tile
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(AMX_DOUBLE)
}  // namespace amx
#include AMX_DOUBLE
namespace amx {
#elif defined(__AMX_TILE__)

inline void configure(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release() { asm volatile("tilerelease"); }

template <int TILE> inline void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }

template <int TILE> inline void load(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE> inline void store(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// SUMS += INPUTS * WEIGHTS, for pairs of bfloat16 in float32
template <int SUMS, int INPUTS, int WEIGHTS> inline void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

// the same for fours of bytes in int32, inputs without a sign
template <int SUMS, int INPUTS, int WEIGHTS> inline void dot_bytes() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

#endif

}  // namespace amx
