// The weights of a row in falling order, of which only those are sorted that have to be looked at one by one.
//
// Weights are counted and summed in buckets, 128 to an octave (the upper bits of the float). A walk in falling order passes
// whole buckets, and sorts the one in which it ends: of a row whose probability is spread over all of a vocabulary that is
// one in some hundreds. Within a bucket numbers lie at equal distances, so its sum follows exactly from how many there are
// and from the sum of their lower bits, which are counted together in one word.
#pragma once

#include "logits.h"

namespace sampling {

// An order of our own has its sort made from the headers: that of std::less lies in Clang's C++ library, to which nothing
// links.
struct Less {
    bool operator()(uint64_t a, uint64_t b) const { return a < b; }
};

// Sorts keys by their upper halves, in three rounds of 11 bits; keys of equal halves keep their order.
inline void sort_keys(std::vector<uint64_t>& keys, std::vector<uint64_t>& spare) {
    if (keys.size() <= 2048) return std::sort(keys.begin(), keys.end(), Less());
    spare.resize(keys.size());
    for (int shift = 32; shift < 65; shift += 11) {
        uint32_t places[2048] = {};
        for (uint64_t key : keys) places[key >> shift & 2047]++;
        uint32_t before = 0;
        for (uint32_t& place : places) {
            uint32_t count = place;
            place = before;
            before += count;
        }
        for (uint64_t key : keys) spare[places[key >> shift & 2047]++] = key;
        keys.swap(spare);
    }
}

class Ranking {
  public:
    struct Bucket {
        double sum;
        int64_t count;
        float least;  // no weight of it is less
    };

    // Weights of all tokens, 1 at most; 0: a token is none of them. `weigh(begin, end, use)` calls use(at, vector) for some.
    template <class Weigh> void fill(int64_t vocabulary, Weigh weigh) {
        distances_.resize((vocabulary + LANES - 1) / LANES * LANES);  // lanes behind the last token will be 0 as weights
        counts_.assign(PARTS * BUCKETS, 0);
        sorted_ = -1;
        for (int64_t begin = 0; begin < vocabulary; begin += BLOCK) {
            int64_t end = std::min<int64_t>(vocabulary, begin + BLOCK);
            weigh(begin, end, [&](int64_t at, Floats weights) {
                Ints distances = ONE - (Ints)weights;
                store(&distances_[at], distances > 0 ? distances : Ints{});
            });
            count(begin, end);
        }
    }

    // Goes through the weights in falling order until `ends(key)`; buckets for which `passes(bucket)` are not looked into.
    template <class Passes, class Ends> void walk(Passes passes, Ends ends) {
        for (int i = 0; i < BUCKETS - 1; i++) {
            uint64_t counts = 0;
            for (int part = 0; part < PARTS; part++) counts += counts_[part * BUCKETS + i];
            if (counts == 0 || passes(bucket(i, counts))) continue;
            for (uint64_t key : sorted(i))
                if (ends(key)) return;
        }
    }

  private:
    // A weight is kept as the number of floats from it to 1, of which the upper bits say its bucket: 0 for the largest.
    static constexpr int ONE = 0x3f800000;
    static constexpr int SHIFT = 16, LOWER = (1 << SHIFT) - 1;
    static constexpr int BUCKETS = (ONE >> SHIFT) + 1;  // the last one has what is 0
    static constexpr int PARTS = 2;                     // neighbours may be of one bucket: none waits for the other
    static constexpr uint64_t ONE_WEIGHT = 1ull << 40;  // above the sum of LOWER bits of 2^24 weights

    void count(int64_t begin, int64_t end) {
        const uint32_t* distances = distances_.data();
        uint64_t *even = counts_.data(), *odd = even + BUCKETS;
        for (int64_t at = begin; at < end; at += 2) {  // a last one that is too much is 0
            uint32_t first = distances[at], second = distances[at + 1];
            even[first >> SHIFT] += ONE_WEIGHT + (first & LOWER);
            odd[second >> SHIFT] += ONE_WEIGHT + (second & LOWER);
        }
    }

    static float weight_of(uint32_t distance) {
        uint32_t bits = ONE - distance;
        return load<float>(&bits);
    }

    static Bucket bucket(int index, uint64_t counts) {
        double most = weight_of(index << SHIFT), least = weight_of((index + 1) << SHIFT), step = (most - least) / (1 << SHIFT);
        auto count = (int64_t)(counts / ONE_WEIGHT);
        return {count * most - (double)(counts % ONE_WEIGHT) * step, count, (float)least};
    }

    const std::vector<uint64_t>& sorted(int bucket) {
        if (bucket == sorted_) return keys_;
        sorted_ = bucket;
        keys_.clear();
        for (size_t at = 0; at < distances_.size(); at += LANES) {
            if (!any((Ints)(load<Words>(&distances_[at]) >> SHIFT) == bucket)) continue;
            for (int i = 0; i < LANES; i++)
                if (distances_[at + i] >> SHIFT == (uint32_t)bucket) keys_.push_back(key_of(weight_of(distances_[at + i]), at + i));
        }
        if (!std::is_sorted(keys_.begin(), keys_.end(), Less())) sort_keys(keys_, spare_);
        return keys_;
    }

    std::vector<uint32_t> distances_;  // by token
    std::vector<uint64_t> counts_;     // [PARTS, BUCKETS]
    std::vector<uint64_t> keys_, spare_;
    int sorted_ = -1;  // the bucket whose weights `keys_` has
};

}  // namespace sampling
