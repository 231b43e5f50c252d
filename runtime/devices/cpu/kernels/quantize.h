// Plain rows of a checkpoint rounded to few bits while they are loaded, to the bit as layers/quantization/layouts.py does
// it with torch: a scale for each row (INT8), or for each group of a row (INT4).
#pragma once

#include <cmath>

#include "simd.h"

namespace quantize {

using namespace simd;

enum Source { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // numbers of weights::Kind

constexpr int PART = 256;  // numbers of a row that are float32 at once
constexpr float HALF_MAX = 65504.0f;

// Rounds to nearest, ties to even, below 2^22: adding this leaves no bits behind the point.
constexpr float ROUNDING = 12582912.0f;

inline float rounded(float x) {
    float sum = x + ROUNDING;
    return sum - ROUNDING;
}

// The nearest number that float16 has.
inline float as_half(float x) {
    uint16_t halves[LANES];
    store_f16(halves, broadcast(x));
    return load_f16(halves)[0];
}

// `count` numbers of a row from number `from` on. `count` is at most PART.
inline void read(Source source, const void* row, int from, int count, float* out) {
    if (source == FLOAT32) memcpy(out, (const float*)row + from, (size_t)count * 4);
    else if (source == BFLOAT16) {
        auto* at = (const uint16_t*)row + from;
        for (int i = 0; i < count; i++) {
            uint32_t bits = (uint32_t)at[i] << 16;
            memcpy(out + i, &bits, 4);
        }
    } else {
        auto* at = (const uint16_t*)row + from;
        int i = 0;
        for (; i + LANES <= count; i += LANES) store(out + i, load_f16(at + i));
        uint16_t rest[LANES] = {};
        memcpy(rest, at + i, (size_t)(count - i) * 2);
        Floats last = load_f16(rest);
        for (int k = 0; i + k < count; k++) out[i + k] = last[k];
    }
}

// A row to numbers from -127 to 127. -> its scale
inline float int8_row(Source source, const void* row, int inputs, int8_t* codes) {
    float part[PART], most = 0;
    for (int at = 0; at < inputs; at += PART) {
        int count = inputs - at < PART ? inputs - at : PART;
        read(source, row, at, count, part);
        for (int i = 0; i < count; i++) {
            float size = fabsf(part[i]);
            most = size > most ? size : most;
        }
    }
    float scale = most / 127.0f;
    scale = scale < 1e-12f ? 1e-12f : scale;
    for (int at = 0; at < inputs; at += PART) {
        int count = inputs - at < PART ? inputs - at : PART;
        read(source, row, at, count, part);
        for (int i = 0; i < count; i++) {
            float x = part[i] / scale;
            x = x < -127.0f ? -127.0f : x > 127.0f ? 127.0f : x;
            codes[at + i] = (int8_t)(int32_t)rounded(x);
        }
    }
    return scale;
}

// At most PART numbers of a group to codes from 0 to 15 around 8: the number that is farthest from 0, the first of
// several, becomes 0 whatever its sign is. -> the group's scale, which float16 has
inline float int4_group(const float* numbers, int count, int32_t* codes) {
    float high = 0, low = 0;
    for (int i = 0; i < count; i++) {
        high = numbers[i] > high ? numbers[i] : high;
        low = numbers[i] < low ? numbers[i] : low;
    }
    float farthest = high > -low ? high : low;
    if (high == -low)
        for (int i = count - 1; i >= 0; i--)
            if (fabsf(numbers[i]) == high) farthest = numbers[i];
    float scale = farthest / -8.0f;
    scale = as_half(scale < -HALF_MAX ? -HALF_MAX : scale > HALF_MAX ? HALF_MAX : scale);
    float divisor = scale == 0 ? 1.0f : scale;
    for (int i = 0; i < count; i++) {
        float x = numbers[i] / divisor;
        x = x < -8.0f ? -8.0f : x > 7.0f ? 7.0f : x;
        codes[i] = (int32_t)rounded(x) + 8;
    }
    return scale;
}

// A row to bytes of two codes, the first in the lower half, and the scales of its groups; `group` is even and at most
// PART, `inputs` even.
inline void int4_row(Source source, const void* row, int inputs, int group, uint8_t* bytes, float* scales) {
    float numbers[PART];
    int32_t codes[PART];
    for (int at = 0; at < inputs; at += group) {
        int count = inputs - at < group ? inputs - at : group;
        read(source, row, at, count, numbers);
        *scales++ = int4_group(numbers, count, codes);
        for (int i = 0; i < count; i += 2) bytes[(at + i) / 2] = (uint8_t)(codes[i] | codes[i + 1] << 4);
    }
}

}  // namespace quantize
