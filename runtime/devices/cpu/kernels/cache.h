// The key/value cache: how its numbers are read and written, and where a token's are.
//
// Numbers of 8 bits are those of Micikevicius et al. (2022): E4M3 without infinities, E5M2 with them. What is beyond
// their range becomes the largest there is, and NaN stays NaN.
#pragma once

#include "step.h"

namespace cache {

using namespace simd;
using step::Number;
using step::Step;

constexpr int MAX_DIM = 640;  // of a head's key, and of its value, with padding

// Numbers of every cached token: [locations, heads, dim].
struct Cache {
    char* data = nullptr;
    int heads = 0, dim = 0;
};

inline char* head_of(const Cache& cache, int64_t location, int head, int bytes) {
    return cache.data + ((size_t)location * cache.heads + head) * cache.dim * bytes;
}

// ---- 8 bits

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

// What differs between the two: bits behind the exponent, the exponent's bias, and the codes that are no numbers.
template <int MANTISSA, int BIAS, uint32_t INFINITE> struct Float8 {
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr uint32_t LARGEST = INFINITE - 1;
    static constexpr float LEAST_NORMAL = 1.0f / (1 << (BIAS - 1));

    static Floats load(const void* at) {
        Words code = __builtin_convertvector(simd::load<Bytes>(at), Words);
        Words digits = code & 0x7fu;
        Words is_small = (Words)(digits < (1u << MANTISSA));  // no leading one: read with one, which is taken off again
        Floats value = (Floats)((digits << SHIFT) + ((127u - BIAS) << 23) + (is_small & (1u << 23)));
        value -= (Floats)((Words)broadcast(LEAST_NORMAL) & is_small);
        Words none = (Words)(digits >= INFINITE);
        Words bits = ((Words)value & ~none) | (none & special(digits)) | (code & 0x80u) << 24;
        return (Floats)bits;
    }

    static void store(void* at, Floats x) {
        Words bits = (Words)x, sign = bits >> 24 & 0x80u;
        Words magnitude = bits & 0x7fffffffu;
        Words normal = (magnitude + ((1u << (SHIFT - 1)) - 1) + (magnitude >> SHIFT & 1u)) >> SHIFT;
        normal -= (127u - BIAS) << MANTISSA;
        Floats size = (Floats)magnitude;
        Words is_small = (Words)(size < broadcast(LEAST_NORMAL));
        Floats small_size = (Floats)(magnitude & is_small);
        Words small = (Words)rounded(small_size * (float)((1u << MANTISSA) / LEAST_NORMAL));
        Words code = (small & is_small) | (normal & ~is_small);
        Words is_large = (Words)(magnitude >= (LARGEST << SHIFT) + ((127u - BIAS) << 23));
        code = (code & ~is_large) | (is_large & LARGEST);
        code |= (Words)(magnitude > 0x7f800000u) & 0x7fu;
        Bytes bytes = __builtin_convertvector(code | sign, Bytes);
        simd::store(at, bytes);
    }

  private:
    static Words special(Words digits) {  // infinity where the format has one, else NaN
        Words nan = (Words)(digits > INFINITE) & 0x00400000u;
        return (INFINITE == 0x7f ? broadcast(0x7fc00000u) : broadcast(0x7f800000u)) | nan;
    }
};

using E4M3 = Float8<3, 7, 0x7f>;
using E5M2 = Float8<2, 15, 0x7c>;

// ---- vectors of any kind

template <Number KIND> inline Floats load(const char* at) {
    if constexpr (KIND == step::FLOAT32) return simd::load<Floats>(at);
    else if constexpr (KIND == step::BFLOAT16) return load_bf16((const uint16_t*)at);
    else if constexpr (KIND == step::FLOAT16) return load_f16((const uint16_t*)at);
    else if constexpr (KIND == step::E4M3) return E4M3::load(at);
    else return E5M2::load(at);
}

template <Number KIND> inline void store(char* at, Floats x) {
    if constexpr (KIND == step::FLOAT32) simd::store(at, x);
    else if constexpr (KIND == step::BFLOAT16) store_bf16((uint16_t*)at, x);
    else if constexpr (KIND == step::FLOAT16) store_f16((uint16_t*)at, x);
    else if constexpr (KIND == step::E4M3) E4M3::store(at, x);
    else E5M2::store(at, x);
}

// The first `count` lanes, zeros behind them; nothing else is read.
template <Number KIND> inline Floats load_first(const char* at, int count) {
    if (count >= LANES) return load<KIND>(at);
    char part[LANES * 4] = {};
    memcpy(part, at, (size_t)count * step::bytes_of(KIND));
    return load<KIND>(part);
}

// Calls use(kind) with the kind as a type, so that what follows is compiled for each.
template <Number KIND> struct Kind {
    static constexpr Number value = KIND;
};

template <class Use> inline void for_kind(Number kind, Use use) {
    switch (kind) {
        case step::FLOAT32: return use(Kind<step::FLOAT32>());
        case step::BFLOAT16: return use(Kind<step::BFLOAT16>());
        case step::FLOAT16: return use(Kind<step::FLOAT16>());
        case step::E4M3: return use(Kind<step::E4M3>());
        case step::E5M2: return use(Kind<step::E5M2>());
    }
}

// Numbers times `scale` to a token's place.
inline void write(const Cache& cache, Number kind, int64_t location, int head, const float* x, float scale) {
    for_kind(kind, [&](auto of) {
        constexpr Number KIND = decltype(of)::value;
        constexpr int BYTES = step::bytes_of(KIND);
        char* to = head_of(cache, location, head, BYTES);
        for (int i = 0; i < cache.dim; i += LANES) {
            int left = cache.dim - i;
            if (left >= LANES) {
                store<KIND>(to + (size_t)i * BYTES, simd::load<Floats>(x + i) * scale);
                continue;
            }
            Floats rest{};
            memcpy(&rest, x + i, (size_t)left * sizeof(float));
            char part[LANES * 4];
            store<KIND>(part, rest * scale);
            memcpy(to + (size_t)i * BYTES, part, (size_t)left * BYTES);
        }
    });
}

// Locations of a slot's tokens [begin, end); positions outside [first, last] have those of the nearest inside, because
// pages outside the window or behind the end may not exist.
inline void locate(const Step& step, int pool, int row, int64_t begin, int64_t end, int64_t first, int64_t last,
                   int64_t* locations) {
    const int32_t* table = step.page_tables[pool] + step.slots[row] * step.pages_per_slot;
    int64_t page = -1, at = 0;
    for (int64_t i = begin; i < end; i++) {
        int64_t position = i < first ? first : i > last ? last : i;
        if (page < 0 || position - page * step.page_size >= step.page_size) {
            page = position / step.page_size;
            at = table[page] * step.page_size;
        }
        locations[i - begin] = at + position - page * step.page_size;
    }
}

}  // namespace cache
