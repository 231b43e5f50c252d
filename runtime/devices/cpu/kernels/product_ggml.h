// Products with weights of ggml's types (ggml.h), whose inputs are int8 in groups of 32 with the sums of their halves.
//
// A group's sum is an exact integer, and float32 from one group to the next.
#pragma once

#include "ggml.h"
#include "operands.h"

namespace product {

// Rows of a tile: they share weights that are unpacked once, as they are multiplied.
constexpr int GGML_ROWS = LANES == 16 ? 8 : 4;
constexpr int WORDS = ggml::GROUP / 4;  // of a group's inputs

// What multiplies the sums of a group of inputs, for a block's outputs.
struct Scales {
    Floats first[VECTORS], second[VECTORS];  // of all inputs, or of the first and of the last 16
    Floats least[VECTORS];                   // what each weight is less
};

// A group of a block's weights: `head` is what its block of the file begins with.
template <class Type> struct Group {
    const char *head, *at;

    // Word `i` of the codes of LANES outputs.
    Words word(int i, int v) const {
        const char* codes = at + Type::SCALE_BYTES + v * LANES * 4;
        Words word = ggml::code_word<Type>([&](int j) { return load<Words>(codes + j * ggml::OUTPUTS * 4); }, i);
        return Type::BITS == 8 && WEIGHT_OFFSET ? word ^ 0x80808080u : word;
    }

    Scales scales() const {
        Scales out;
        for (int v = 0; v < VECTORS; v++) {
            const char* bytes = at + v * LANES;
            out.first[v] = load_f16((const uint16_t*)head + v * LANES);
            if constexpr (Type::SCALES == ggml::WITH_LEAST) {
                Floats dmin = load_f16((const uint16_t*)head + ggml::OUTPUTS + v * LANES);
                out.first[v] *= floats(load_bytes((const uint8_t*)bytes));
                out.least[v] = dmin * floats(load_bytes((const uint8_t*)bytes + ggml::OUTPUTS));
            }
            if constexpr (Type::SCALES == ggml::OF_HALVES) {
                out.second[v] = out.first[v] * floats(load_signed_bytes(bytes + ggml::OUTPUTS));
                out.first[v] *= floats(load_signed_bytes(bytes));
            }
        }
        return out;
    }
};

// COUNT rows of inputs, and their sums with a block of weights.
template <class Type, int COUNT> class GgmlTile {
  public:
    GgmlTile(const rows::Rows& x, int row) : per_row_(x.width / rows::GROUP) {
        for (int m = 0; m < COUNT; m++) inputs_[m] = rows::row_of(x, row + m);
        scales_ = x.scales + (size_t)row * per_row_;
        sums_ = x.sums + (size_t)row * per_row_ * 2;
    }

    // Adds the products of group `at` of the inputs. Words go by before rows do: a word is unpacked, meets all rows, and
    // leaves its register to the next.
    void add(int at, const Group<Type>& group) {
        Ints low[COUNT][VECTORS], high[COUNT][VECTORS];
        for (int m = 0; m < COUNT; m++) {
            const int32_t* halves = halves_of(m, at);
            for (int v = 0; v < VECTORS; v++) low[m][v] = broadcast(-OFFSET * (HAS_HALVES ? halves[0] : halves[0] + halves[1]));
        }
        add_words<0, MIDDLE>(at, group, low);
        if constexpr (HAS_HALVES) {
            for (int m = 0; m < COUNT; m++)
                for (int v = 0; v < VECTORS; v++) high[m][v] = broadcast(-OFFSET * halves_of(m, at)[1]);
            add_words<MIDDLE, WORDS>(at, group, high);
        }
        const Scales scales = group.scales();
        for (int m = 0; m < COUNT; m++) {
            float scale = scales_[m * per_row_ + at], sum = scale * (float)(halves_of(m, at)[0] + halves_of(m, at)[1]);
            for (int v = 0; v < VECTORS; v++) {
                if constexpr (HAS_HALVES)
                    total[m][v] += broadcast(scale) * (scales.first[v] * floats(low[m][v]) + scales.second[v] * floats(high[m][v]));
                else total[m][v] += broadcast(scale) * scales.first[v] * floats(low[m][v]);
                if constexpr (Type::SCALES == ggml::WITH_LEAST) total[m][v] -= broadcast(sum) * scales.least[v];
            }
        }
    }

    Floats total[COUNT][VECTORS] = {};

  private:
    static constexpr bool HAS_HALVES = Type::SCALES == ggml::OF_HALVES;  // which have scales of their own
    static constexpr int MIDDLE = HAS_HALVES ? WORDS / 2 : WORDS;
    static constexpr int OFFSET = Type::BITS == 8 ? WEIGHT_OFFSET : Type::OFFSET;  // of codes: sums of inputs take it out

    const int32_t* halves_of(int m, int at) const { return sums_ + ((size_t)m * per_row_ + at) * 2; }

    // Words that one partial sum takes: of codes as large as this type has them.
    static constexpr int STRIDE = Type::BITS == 8 ? 1 : words_of_partial((1 << Type::BITS) - 1);

    template <int BEGIN, int END> void add_words(int at, const Group<Type>& group, Ints (*sums)[VECTORS]) const {
#pragma GCC unroll 8
        for (int first = BEGIN; first < END; first += STRIDE) {
            Partial parts[COUNT][VECTORS];
            for (int m = 0; m < COUNT; m++)
                for (int v = 0; v < VECTORS; v++) parts[m][v] = begin_partial(sums[m][v]);
#pragma GCC unroll 8
            for (int i = first; i < (first + STRIDE < END ? first + STRIDE : END); i++) {
                Words codes[VECTORS];
                for (int v = 0; v < VECTORS; v++) codes[v] = group.word(i, v);
#pragma GCC unroll 8
                for (int m = 0; m < COUNT; m++) {
                    Words four = word_at(inputs_[m], at * WORDS + i);
                    for (int v = 0; v < VECTORS; v++)
                        if constexpr (Type::BITS == 8) sums[m][v] = dot_signed(sums[m][v], codes[v], four);
                        else parts[m][v] = add_partial(parts[m][v], codes[v], four);
                }
            }
            if constexpr (Type::BITS != 8)
                for (int m = 0; m < COUNT; m++)
                    for (int v = 0; v < VECTORS; v++) sums[m][v] = end_partial(sums[m][v], parts[m][v]);
        }
    }

    const int per_row_;
    const char* inputs_[COUNT];
    const float* scales_;
    const int32_t* sums_;
};

template <class Type, int COUNT>
inline void ggml_tile(int width, const rows::Rows& x, int row, const char* data, Floats (*out)[VECTORS]) {
    GgmlTile<Type, COUNT> tile(x, row);
    for (int at = 0; at < width / ggml::GROUP;) {
        const char* head = data;
        prefetch(head, Type::HEAD_BYTES);
        data += Type::HEAD_BYTES;
        for (int group = 0; group < Type::GROUPS; group++, at++, data += Type::GROUP_BYTES) {
            prefetch(data, Type::GROUP_BYTES);
            tile.add(at, {head, data});
        }
    }
    for (int m = 0; m < COUNT; m++)
        for (int v = 0; v < VECTORS; v++) out[m][v] = tile.total[m][v];
}

}  // namespace product
