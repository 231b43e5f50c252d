// Products with weights of ggml's types (ggml.h), whose inputs are int8 in groups of 32 with the sums of their halves.
//
// A group's sum is an exact integer, and float32 from one group to the next.
#pragma once

#include "ggml.h"
#include "operands.h"

namespace product {

// Rows of a tile: as many totals as leave registers for a group's codes.
constexpr int GGML_ROWS = LANES == 16 ? 8 : LANES == 8 ? 2 : 4;

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

inline Floats floats_of(Bytes x) { return floats(__builtin_convertvector(x, Ints)); }
inline Floats floats_of(SignedBytes x) { return floats(__builtin_convertvector(x, Ints)); }

// The codes of a group of LANES outputs, as words of inputs.
template <class Type> inline void load_codes(const char* at, Words* words) {
    ggml::unpack_codes<Type>([&](int i) { return load<Words>(at + i * ggml::OUTPUTS * 4); }, words);
    if constexpr (Type::BITS == 8 && WEIGHT_OFFSET)
        for (int i = 0; i < 8; i++) words[i] ^= 0x80808080u;
}

// Four words of inputs from `first` on, times as many of weights.
template <class Type> inline Ints dot_half(Ints total, const char* inputs, int first, const Words* words) {
    for (int i = 0; i < 4; i++) {
        Words four = word_at(inputs, first + i);
        total = Type::BITS == 8 ? dot_signed(total, words[i], four) : dot_unsigned(total, words[i], four);
    }
    return total;
}

template <class Type, int COUNT>
inline void ggml_tile(int width, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    constexpr int OFFSET = Type::BITS == 8 ? WEIGHT_OFFSET : Type::OFFSET;
    const char* inputs[COUNT];
    for (int m = 0; m < COUNT; m++) inputs[m] = rows::row_of(x, row + m);
    int per_row = x.width / rows::GROUP;
    const float* input_scales = x.scales + (size_t)row * per_row;
    const int32_t* input_sums = x.sums + (size_t)row * per_row * 2;
    Floats total[COUNT][VECTORS] = {};
    for (int at = 0; at < width / ggml::GROUP;) {  // groups
        Floats d[VECTORS], dmin[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            d[v] = load_f16((const uint16_t*)data + v * LANES);
            if constexpr (Type::SCALES == ggml::WITH_LEAST) dmin[v] = load_f16((const uint16_t*)data + ggml::OUTPUTS + v * LANES);
        }
        data += Type::HEAD_BYTES;
        for (int group = 0; group < Type::GROUPS; group++, at++, data += Type::GROUP_BYTES) {
            prefetch(data, Type::GROUP_BYTES);
            float scales[COUNT], sums[COUNT];  // of the inputs
            int32_t starts[COUNT][2];          // what takes the offset of the codes out again, of halves or of all
            for (int m = 0; m < COUNT; m++) {
                const int32_t* halves = input_sums + ((size_t)m * per_row + at) * 2;
                scales[m] = input_scales[m * per_row + at];
                sums[m] = scales[m] * (float)(halves[0] + halves[1]);
                if constexpr (Type::SCALES == ggml::OF_HALVES)
                    for (int half = 0; half < 2; half++) starts[m][half] = -OFFSET * halves[half];
                else starts[m][0] = -OFFSET * (halves[0] + halves[1]);
            }
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                Words words[8];
                load_codes<Type>(data + Type::SCALE_BYTES + v * LANES * 4, words);
                Floats first = d[v], second = d[v], least{};
                if constexpr (Type::SCALES == ggml::WITH_LEAST) {
                    first *= floats_of(load<Bytes>(data + v * LANES));
                    least = dmin[v] * floats_of(load<Bytes>(data + ggml::OUTPUTS + v * LANES));
                }
                if constexpr (Type::SCALES == ggml::OF_HALVES) {
                    first *= floats_of(load<SignedBytes>(data + v * LANES));
                    second *= floats_of(load<SignedBytes>(data + ggml::OUTPUTS + v * LANES));
                }
#pragma GCC unroll 8
                for (int m = 0; m < COUNT; m++) {
                    Ints low = dot_half<Type>(broadcast(starts[m][0]), inputs[m], at * 8, words);
                    if constexpr (Type::SCALES == ggml::OF_HALVES) {
                        Ints high = dot_half<Type>(broadcast(starts[m][1]), inputs[m], at * 8 + 4, words + 4);
                        total[m][v] += broadcast(scales[m]) * (first * floats(low) + second * floats(high));
                    } else {
                        Ints all = dot_half<Type>(low, inputs[m], at * 8 + 4, words + 4);
                        total[m][v] += broadcast(scales[m]) * first * floats(all);
                    }
                    if constexpr (Type::SCALES == ggml::WITH_LEAST) total[m][v] -= broadcast(sums[m]) * least;
                }
            }
        }
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = total[m][v];
}

}  // namespace product
