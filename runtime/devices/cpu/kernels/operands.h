// What every product reads: a few inputs at once, and weights ahead of their use.
#pragma once

#include "simd.h"

namespace product {

using namespace simd;

constexpr int PREFETCH = 4096;  // bytes ahead of the weights in use

inline Words word_at(const char* row, int index) {
    return broadcast(load<uint32_t>(row + (size_t)index * 4));
}

inline void prefetch(const char* at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + PREFETCH + i, 0, 3);
}

}  // namespace product
