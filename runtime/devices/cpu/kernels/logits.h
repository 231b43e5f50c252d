// Rows of logits [rows, vocabulary], what may be done to them behind the head (masks, penalties), and how they are read.
//
// A row is read in blocks of fixed length, each of them a chunk of the team. Sums run over the block, then over the
// blocks in order, so the bits of a row depend on neither threads nor other rows. Logits may be anything: what is not
// finite counts as FAR or -FAR.
#pragma once

#include <math.h>

#include <algorithm>
#include <vector>

#include "functions.h"

namespace sampling {

using namespace simd;

constexpr int BLOCK = 8192;  // numbers of a row that one chunk reads
constexpr float FAR = 1e30f;
constexpr float BANNED = -4 * FAR;
constexpr uint32_t ALL = 0xffffffffu;
constexpr float LOWEST = -87.0f, TINY = 2e-38f;  // exp(LOWEST) is a normal number below TINY

// A sum in float64 of numbers that are not negative, lane by lane. GROUP vectors are added in float32 first: that
// costs digits as the exponential does, and half the time.
class Sum {
  public:
    void add(Floats x) {
        group_ += x;
        if (++count_ % GROUP == 0) flush();
    }

    double total() {
        flush();
        double total = 0;
        for (double lane : lanes_) total += lane;
        return total;
    }

  private:
    static constexpr int GROUP = 8;

    void flush() {
        float parts[LANES];
        store(parts, group_);
        for (int i = 0; i < LANES; i++) lanes_[i] += parts[i];
        group_ = Floats{};
    }

    Floats group_{};
    int count_ = 0;
    double lanes_[LANES] = {};
};

// NaN and -inf become -FAR, +inf becomes FAR.
inline Floats clean(Floats x) {
    Ints is_finite = ((Words)x & 0x7fffffffu) < 0x7f800000u;
    Floats far = x > 0.0f ? broadcast(FAR) : broadcast(-FAR);
    return is_finite ? x : far;
}

// Which lanes of a vector bits allow: token i is bit i % 32 of word i / 32.
inline Ints allowed_lanes(const uint32_t* bits, int64_t at) {
    Words lane_bits;
    for (int i = 0; i < LANES; i++) lane_bits[i] = 1u << i;
    return (broadcast(bits[at / 32] >> at % 32) & lane_bits) != 0u;
}

// BANNED in place of what is not allowed, -inf too. A lower number stays.
inline Floats ban(Floats x, Ints allowed) {
    Ints is_lower = x < BANNED & x > -INFINITY;
    return allowed | is_lower ? x : broadcast(BANNED);
}

// A row of logits as it counts: its numbers, and bits of the tokens that may be chosen; null: all may.
struct Row {
    float* numbers;
    const uint32_t* bits;

    // Bits of the 32 tokens from `at` on, a multiple of 32.
    uint32_t word(int64_t at) const { return bits ? bits[at / 32] : ALL; }
};

// A vector of a row from `at` on; lanes behind its end are -inf in place of numbers.
inline Floats load_logits(const Row& row, int64_t at, int64_t end) {
    if (end - at >= LANES) {
        Floats x = load<Floats>(row.numbers + at);
        return clean(row.bits ? ban(x, allowed_lanes(row.bits, at)) : x);
    }
    float part[LANES] = {};
    memcpy(part, row.numbers + at, (end - at) * sizeof(float));
    Floats x = load<Floats>(part);
    x = clean(row.bits ? ban(x, allowed_lanes(row.bits, at)) : x);
    for (int i = (int)(end - at); i < LANES; i++) x[i] = -INFINITY;
    return x;
}

// A number that orders as floats do, the larger ones first, and of equal ones the first id.
inline uint64_t key_of(float value, int64_t id) {
    uint32_t bits = load<uint32_t>(&value);
    uint32_t rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return (uint64_t)~rising << 32 | (uint32_t)id;
}

inline float value_of(uint64_t key) {
    uint32_t rising = ~(uint32_t)(key >> 32);
    uint32_t bits = rising ^ (rising >> 31 ? 0x80000000u : 0xffffffffu);
    return load<float>(&bits);
}

inline int64_t id_of(uint64_t key) { return (uint32_t)key; }

// Rows of logits, cut into blocks.
struct Logits {
    int64_t num_rows, vocabulary;
    float* numbers;

    int num_blocks() const { return (int)((vocabulary + BLOCK - 1) / BLOCK); }
    float* row(int64_t index) const { return numbers + index * vocabulary; }
    int64_t begin(int block) const { return (int64_t)block * BLOCK; }
    int64_t end(int block) const { return std::min<int64_t>(vocabulary, (int64_t)(block + 1) * BLOCK); }
};

// Bits [count, ceil(vocabulary / 32)] of the tokens that may be chosen in some rows.
struct Masks {
    const int64_t* rows;
    int64_t count;
    const uint32_t* bits;

    const uint32_t* of(int64_t index, const Logits& logits) const { return bits + index * ((logits.vocabulary + 31) / 32); }
};

// Bans what bits exclude in a block of a row.
inline void mask_block(const Logits& logits, int64_t row, int block, const uint32_t* bits) {
    float* numbers = logits.row(row);
    int64_t at = logits.begin(block), end = logits.end(block);
    for (; at + LANES <= end; at += LANES)
        store(numbers + at, ban(load<Floats>(numbers + at), allowed_lanes(bits, at)));
    for (; at < end; at++)
        if (!(bits[at / 32] >> at % 32 & 1) && !(numbers[at] < BANNED && numbers[at] > -INFINITY)) numbers[at] = BANNED;
}

// What sequences have seen, one row each; operands.py has the same fields and says what penalties do.
struct Seen {
    const int32_t* generated;  // [rows, vocabulary]
    const uint8_t* in_prompt;  // [rows, vocabulary], 0 or 1
    const float* penalties;  // [rows, 3]: frequency, presence, repetition
};

inline void penalise_block(const Logits& logits, int64_t row, int block, const Seen& seen, int64_t at) {
    float* numbers = logits.row(row);
    const int32_t* generated = seen.generated + at * logits.vocabulary;
    const uint8_t* in_prompt = seen.in_prompt + at * logits.vocabulary;
    const float* penalties = seen.penalties + at * 3;
    float frequency = penalties[0], presence = penalties[1], repetition = penalties[2];
    for (int64_t i = logits.begin(block); i < logits.end(block); i++) {
        float x = numbers[i];
        int32_t count = generated[i];
        float scaled = x > 0 ? x / repetition : x * repetition;
        x = in_prompt[i] | (count > 0) ? scaled : x;
        numbers[i] = x - frequency * count - (count > 0 ? presence : 0.0f);
    }
}

inline float largest_of(const Row& row, int64_t begin, int64_t end) {
    Floats best[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    int64_t at = begin;
    if (!row.bits)
        for (; at + 4 * LANES <= end; at += 4 * LANES)
            for (int k = 0; k < 4; k++) best[k] = max(clean(load<Floats>(row.numbers + at + k * LANES)), best[k]);
    for (; at < end; at += LANES) best[0] = max(load_logits(row, at, end), best[0]);
    return largest(max(max(best[0], best[1]), max(best[2], best[3])));
}

// The largest number of a stretch that is allowed, and is not below BANNED; BANNED: there is none. `begin` is a multiple
// of 32. In words that allow some tokens numbers become clean, and BANNED for the others; of other words no number is read or written.
inline float mask_and_find_largest(const Row& row, int64_t begin, int64_t end) {
    Floats best[4] = {broadcast(BANNED), broadcast(BANNED), broadcast(BANNED), broadcast(BANNED)};
    int64_t at = begin;
    for (; at + 32 <= end; at += 32) {
        uint32_t word = row.word(at);
        for (int i = 0; word != 0 && i < 32 / LANES; i++) {
            float* numbers = row.numbers + at + i * LANES;
            Floats x = clean(load<Floats>(numbers));
            if (word != ALL) store(numbers, x = allowed_lanes(row.bits, at + i * LANES) | x < BANNED ? x : broadcast(BANNED));
            best[i % 4] = max(x, best[i % 4]);
        }
    }
    for (; at < end; at += LANES) best[0] = max(load_logits(row, at, end), best[0]);
    return largest(max(max(best[0], best[1]), max(best[2], best[3])));
}

// Keys of the `width` largest numbers of a stretch, the largest first, of equal ones the first id.
inline void find_best(const Row& row, int64_t begin, int64_t end, size_t width, std::vector<uint64_t>& best) {
    best.clear();
    float least = width ? -INFINITY : INFINITY;  // of a full list
    for (int64_t at = begin; at < end; at += LANES) {
        Floats x = load_logits(row, at, end);
        if (!any(x > least)) continue;
        for (int i = 0; i < LANES && at + i < end; i++) {
            if (!(x[i] > least)) continue;
            uint64_t key = key_of(x[i], at + i);
            if (best.size() == width) best.pop_back();
            best.insert(std::upper_bound(best.begin(), best.end(), key), key);
            if (best.size() == width) least = value_of(best.back());
        }
    }
}

// exp((logit - most) / temperature), where that is more than TINY; else 0.
inline Floats weights_of(Floats logits, float most, float temperature) {
    Floats weight = bounded_exponential(max((logits - most) / temperature, broadcast(LOWEST)));
    return weight > TINY ? weight : Floats{};
}

// Calls use(at, vector) for the weights of a stretch. `begin` is a multiple of 32. Of a row with bits
// mask_and_find_largest has read the stretch before; where `most` is above BANNED, words without an allowed token are
// not read: their weights are 0.
template <class Use>
inline void for_weights(const Row& row, int64_t begin, int64_t end, float most, float temperature, Use use) {
    int64_t at = begin;
    for (; most > BANNED && at + 32 <= end; at += 32)
        for (int64_t i = at, word = row.word(at); i < at + 32; i += LANES)
            use(i, word ? weights_of(clean(load<Floats>(row.numbers + i)), most, temperature) : Floats{});
    for (; at < end; at += LANES) use(at, weights_of(load_logits(row, at, end), most, temperature));
}

}  // namespace sampling
