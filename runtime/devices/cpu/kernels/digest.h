// A digest of memory, at the speed at which memory is read: it finds damage, and is none against an attacker.
//
// Memory is cut into pieces of 1 MB. Within a piece each lane of a few vectors is a polynomial in an odd number, modulo
// 2^32, so one changed word changes it whatever the word is; lanes and pieces are mixed with their places.
#pragma once

#include "simd.h"

namespace digest {

using namespace simd;

constexpr int64_t PIECE = 1 << 20;  // bytes

inline uint64_t mix(uint64_t x) {  // the finalizer of SplitMix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Of the piece that is number `index`; digests of pieces are added.
inline uint64_t of_piece(const uint32_t* data, int64_t index) {
    constexpr int PARTS = 8;  // vectors that do not wait for each other
    Words states[PARTS] = {};
    Words factor = broadcast(0x9e3779b1u);
    for (int64_t i = 0; i < PIECE / 4; i += PARTS * LANES)
        for (int k = 0; k < PARTS; k++) states[k] = states[k] * factor + load<Words>(data + i + k * LANES);
    uint64_t total = 0;
    for (int k = 0; k < PARTS; k++)
        for (int i = 0; i < LANES; i++) total = mix(total + states[k][i]);
    return mix(total + (uint64_t)index);
}

}  // namespace digest
