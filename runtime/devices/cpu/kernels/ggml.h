// ggml's types, packed without loss: codes, scales and leasts are those of the file, in another order.
//
// A block of a file has one or eight GROUPs of inputs. Packed, it holds all OUTPUTS outputs of a block of the matrix:
//
//   float16 d [output]                                         of all types
//   float16 dmin [output]                                      Q4_K, Q5_K
//   then for each group
//     uint8 scale [output], uint8 least [output]               Q4_K, Q5_K (6 bits in the file)
//     int8 scale of the first 16 [output], of the last 16      Q6_K
//     upper bits of the codes, words [output]                  Q5_0, Q5_K: one word, Q6_K: two
//     codes, words [output]                                    four words of halves of bytes, Q8_0: eight of bytes
//
// Word `i` of a group's inputs are inputs 4 i .. 4 i + 3, a byte each. Of four words of halves, word e has words 2 e
// (lower halves) and 2 e + 1 (upper halves). A weight is d * scale * (code - OFFSET) - dmin * least.
#pragma once

#include "rows.h"

namespace ggml {

using namespace simd;

constexpr int GROUP = 32;
constexpr int MAX_GROUPS = 8;             // of a block
constexpr int OUTPUTS = VECTORS * LANES;  // of a block of the matrix

// Which scales a group has besides d.
enum Scales { NONE, WITH_LEAST, OF_HALVES };

// One output's block, unpacked.
struct Numbers {
    uint16_t d, dmin;
    uint8_t scales[2 * MAX_GROUPS];  // one for each group, or for each half of one (int8)
    uint8_t leasts[MAX_GROUPS];
    uint8_t codes[MAX_GROUPS * GROUP];
};

template <int GROUPS_, int BITS_, int OFFSET_, Scales SCALES_> struct Layout {
    static constexpr int GROUPS = GROUPS_, BITS = BITS_, OFFSET = OFFSET_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr int HEAD_BYTES = OUTPUTS * (SCALES == WITH_LEAST ? 4 : 2);
    static constexpr int SCALE_BYTES = SCALES == NONE ? 0 : OUTPUTS * 2;
    static constexpr int UPPER_WORDS = BITS == 5 ? 1 : BITS == 6 ? 2 : 0;
    static constexpr int CODE_WORDS = BITS == 8 ? 8 : 4;
    static constexpr int GROUP_BYTES = SCALE_BYTES + OUTPUTS * 4 * (UPPER_WORDS + CODE_WORDS);
    static constexpr int BLOCK_BYTES = HEAD_BYTES + GROUPS * GROUP_BYTES;
};

// Lower halves of `bytes` bytes, then their upper halves.
inline void read_halves(const uint8_t* from, int bytes, uint8_t* codes) {
    for (int i = 0; i < bytes; i++) {
        codes[i] = from[i] & 15;
        codes[bytes + i] = from[i] >> 4;
    }
}

// The 6-bit scales and leasts of Q4_K and Q5_K in 12 bytes.
inline void read_scales_and_leasts(const uint8_t* from, Numbers& out) {
    for (int i = 0; i < 4; i++) {
        out.scales[i] = from[i] & 63;
        out.leasts[i] = from[4 + i] & 63;
        out.scales[4 + i] = (from[8 + i] & 15) | (from[i] >> 6 << 4);
        out.leasts[4 + i] = from[8 + i] >> 4 | (from[4 + i] >> 6 << 4);
    }
}

struct Q4_0 : Layout<1, 4, 8, NONE> {
    static constexpr int FILE_BYTES = 18;
    static void read(const uint8_t* from, Numbers& out) {
        out.d = load<uint16_t>(from);
        read_halves(from + 2, 16, out.codes);
    }
};

struct Q5_0 : Layout<1, 5, 16, NONE> {
    static constexpr int FILE_BYTES = 22;
    static void read(const uint8_t* from, Numbers& out) {
        out.d = load<uint16_t>(from);
        read_halves(from + 6, 16, out.codes);
        auto upper = load<uint32_t>(from + 2);
        for (int i = 0; i < GROUP; i++) out.codes[i] |= (upper >> i & 1) << 4;
    }
};

struct Q8_0 : Layout<1, 8, 0, NONE> {
    static constexpr int FILE_BYTES = 34;
    static void read(const uint8_t* from, Numbers& out) {
        out.d = load<uint16_t>(from);
        memcpy(out.codes, from + 2, GROUP);
    }
};

struct Q4_K : Layout<8, 4, 0, WITH_LEAST> {
    static constexpr int FILE_BYTES = 144;
    static void read(const uint8_t* from, Numbers& out) {
        out.d = load<uint16_t>(from);
        out.dmin = load<uint16_t>(from + 2);
        read_scales_and_leasts(from + 4, out);
        for (int pair = 0; pair < 4; pair++) read_halves(from + 16 + pair * 32, 32, out.codes + pair * 64);
    }
};

struct Q5_K : Layout<8, 5, 0, WITH_LEAST> {
    static constexpr int FILE_BYTES = 176;
    static void read(const uint8_t* from, Numbers& out) {
        out.d = load<uint16_t>(from);
        out.dmin = load<uint16_t>(from + 2);
        read_scales_and_leasts(from + 4, out);
        for (int pair = 0; pair < 4; pair++) read_halves(from + 48 + pair * 32, 32, out.codes + pair * 64);
        for (int group = 0; group < 8; group++)
            for (int i = 0; i < GROUP; i++) out.codes[group * GROUP + i] |= (from[16 + i] >> group & 1) << 4;
    }
};

struct Q6_K : Layout<8, 6, 32, OF_HALVES> {
    static constexpr int FILE_BYTES = 210;
    static void read(const uint8_t* from, Numbers& out) {
        out.d = load<uint16_t>(from + 208);
        memcpy(out.scales, from + 192, 16);
        for (int half = 0; half < 2; half++) {
            uint8_t* codes = out.codes + half * 128;
            read_halves(from + half * 64, 64, codes);
            for (int group = 0; group < 4; group++)
                for (int i = 0; i < GROUP; i++)
                    codes[group * GROUP + i] |= (from[128 + half * 32 + i] >> (2 * group) & 3) << 4;
        }
    }
};

// A group's codes as words: upper bits, then lower ones, for one output.
template <class Type> inline void pack_codes(const uint8_t* codes, uint32_t* to) {
    uint32_t words[8];
    memcpy(words, codes, GROUP);
    if constexpr (Type::BITS == 5) {
        *to = 0;
        for (int i = 0; i < 8; i++) *to |= (words[i] >> 4 & 0x01010101u) << i;
        to += OUTPUTS;
    }
    if constexpr (Type::BITS == 6)
        for (int half = 0; half < 2; half++, to += OUTPUTS) {
            *to = 0;
            for (int i = 0; i < 4; i++) *to |= (words[half * 4 + i] >> 4 & 0x03030303u) << (2 * i);
        }
    for (int i = 0; i < Type::CODE_WORDS; i++, to += OUTPUTS)
        *to = Type::BITS == 8 ? words[i] : (words[2 * i] & 0x0f0f0f0fu) | (words[2 * i + 1] & 0x0f0f0f0fu) << 4;
}

template <class Word> inline Word moved(Word bits, int up) { return up >= 0 ? bits << up : bits >> -up; }

// Word `i` of the same back, with OFFSET still in it. `read(j)` is word j of the group: of one output, or of a vector of them.
template <class Type, class Read> inline auto code_word(Read read, int i) {
    if constexpr (Type::BITS == 8) return read(i);
    else {
        auto word = read(Type::UPPER_WORDS + i / 2) >> (i % 2 * 4) & 0x0f0f0f0fu;
        if constexpr (Type::BITS == 5) word |= moved(read(0), 4 - i) & 0x10101010u;
        if constexpr (Type::BITS == 6) word |= moved(read(i / 4), 4 - i % 4 * 2) & 0x30303030u;
        return word;
    }
}

// One output of a block of the matrix, from its row in the file of `blocks` blocks.
template <class Type> inline void pack_output(const uint8_t* row, int blocks, int in_block, char* to) {
    for (int block = 0; block < blocks; block++, row += Type::FILE_BYTES, to += Type::BLOCK_BYTES) {
        Numbers numbers;
        Type::read(row, numbers);
        ((uint16_t*)to)[in_block] = numbers.d;
        if constexpr (Type::SCALES == WITH_LEAST) ((uint16_t*)to)[OUTPUTS + in_block] = numbers.dmin;
        for (int group = 0; group < Type::GROUPS; group++) {
            auto* at = (uint8_t*)to + Type::HEAD_BYTES + group * Type::GROUP_BYTES;
            if constexpr (Type::SCALES == WITH_LEAST) {
                at[in_block] = numbers.scales[group];
                at[OUTPUTS + in_block] = numbers.leasts[group];
            }
            if constexpr (Type::SCALES == OF_HALVES)
                for (int half = 0; half < 2; half++) at[half * OUTPUTS + in_block] = numbers.scales[2 * group + half];
            pack_codes<Type>(numbers.codes + group * GROUP, (uint32_t*)(at + Type::SCALE_BYTES) + in_block);
        }
    }
}

inline float from_f16(uint16_t x) {
    uint16_t lanes[LANES] = {x};
    return load_f16(lanes)[0];
}

// The same back as float32 [blocks * GROUPS * GROUP], each number as ggml defines it.
template <class Type> inline void unpack_output(const char* from, int blocks, int in_block, float* out) {
    for (int block = 0; block < blocks; block++, from += Type::BLOCK_BYTES) {
        float d = from_f16(((const uint16_t*)from)[in_block]), dmin = 0;
        if constexpr (Type::SCALES == WITH_LEAST) dmin = from_f16(((const uint16_t*)from)[OUTPUTS + in_block]);
        for (int group = 0; group < Type::GROUPS; group++, out += GROUP) {
            auto* at = (const uint8_t*)from + Type::HEAD_BYTES + group * Type::GROUP_BYTES;
            auto* codes = (const uint32_t*)(at + Type::SCALE_BYTES) + in_block;
            for (int i = 0; i < GROUP; i++) {
                uint8_t byte = code_word<Type>([&](int j) { return codes[j * OUTPUTS]; }, i / 4) >> (i % 4 * 8);
                float code = Type::BITS == 8 ? (int8_t)byte : byte - Type::OFFSET, scale = d, least = 0;
                if constexpr (Type::SCALES == WITH_LEAST) {
                    scale *= at[in_block];
                    least = dmin * at[OUTPUTS + in_block];
                }
                if constexpr (Type::SCALES == OF_HALVES) scale *= (int8_t)at[i / 16 * OUTPUTS + in_block];
                out[i] = scale * code - least;
            }
        }
    }
}

}  // namespace ggml
