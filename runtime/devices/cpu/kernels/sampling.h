// A token for each row of logits. layers/sampling/sampler.py says which: the same tokens come from the same random
// numbers, in fewer passes.
#pragma once

#include <vector>

#include "ranking.h"
#include "team.h"

namespace sampling {

// How to sample from a row. top_k 0: no limit.
struct Choice {
    float temperature, top_p, min_p;
    int64_t top_k;
    double uniform;

    bool is_random() const { return temperature > 0; }
    bool is_cut(int64_t vocabulary) const { return is_random() && ((top_k > 0 && top_k < vocabulary) || top_p < 1); }
};

// Samples from weights in falling order, `total` being the sum of all of them and of those that are not here.
inline int64_t sample_sorted(const std::vector<uint64_t>& keys, double total, const Choice& choice) {
    size_t count = keys.size();
    if (choice.top_k > 0 && (size_t)choice.top_k < count) count = choice.top_k;
    if (choice.top_k > 0) {
        total = 0;
        for (size_t i = 0; i < count; i++) total += value_of(keys[i]);
    }
    double mass = total * choice.top_p, kept = 0;
    size_t taken = 0;
    for (; taken < count; taken++) {
        float weight = value_of(keys[taken]);
        if (taken > 0 && ((choice.top_p < 1 && kept >= mass) || weight < choice.min_p)) break;
        kept += weight;
    }
    double target = kept * choice.uniform, sum = 0;
    for (size_t i = 0; i < taken; i++) {
        sum += value_of(keys[i]);
        if (sum > target) return id_of(keys[i]);
    }
    return id_of(keys[taken - 1]);
}

// The same of weights that are ranked.
inline int64_t sample_ranked(Ranking& ranking, double total, const Choice& choice) {
    using Bucket = Ranking::Bucket;
    const int64_t most = choice.top_k > 0 ? choice.top_k : INT64_MAX;
    auto add_up = [&](double mass, float least) {  // -> the sum of the weights that are kept, and their number
        std::pair<double, int64_t> kept{0, 0};
        ranking.walk(
            [&](const Bucket& bucket) {
                bool passes = kept.second + bucket.count <= most && kept.first + bucket.sum < mass && bucket.least >= least;
                if (passes) kept = {kept.first + bucket.sum, kept.second + bucket.count};
                return passes;
            },
            [&](uint64_t key) {
                float weight = value_of(key);
                if (kept.second == most || (kept.second > 0 && (kept.first >= mass || weight < least))) return true;
                kept = {kept.first + weight, kept.second + 1};
                return false;
            });
        return kept;
    };
    if (choice.top_k > 0) total = add_up(INFINITY, 0).first;
    auto [kept, count] = add_up(choice.top_p < 1 ? total * choice.top_p : INFINITY, choice.min_p);
    double target = kept * choice.uniform, sum = 0;
    int64_t seen = 0, found = 0;
    ranking.walk(
        [&](const Bucket& bucket) {
            bool passes = seen + bucket.count < count && sum + bucket.sum <= target;
            if (passes) sum += bucket.sum, seen += bucket.count;
            return passes;
        },
        [&](uint64_t key) {
            found = id_of(key);
            sum += value_of(key);
            return sum > target || ++seen == count;
        });
    return found;
}

// A token for each row: the maxima of blocks, weights of blocks where rows are random, and then one chunk for a row.
class Sampler final : public team::Work {
  public:
    explicit Sampler(int num_threads) : keys_(num_threads), spares_(num_threads), rankings_(num_threads) {}

    // Arrays by row; `temperatures` null: all rows are greedy.
    struct Choices {
        const float *temperatures, *top_p, *min_p;
        const int64_t* top_k;
        const double* uniform;
    };

    void run(team::Team* team, const Logits& logits, const Masks& masks, const Choices& choices, int64_t* tokens) {
        logits_ = logits;
        bits_.assign(logits.num_rows, nullptr);
        for (int64_t i = 0; i < masks.count; i++) bits_[masks.rows[i]] = masks.of(i, logits);
        tokens_ = tokens;
        choices_.resize(logits.num_rows);
        random_.clear();
        for (int64_t i = 0; i < logits.num_rows; i++) {
            const Choices& c = choices;
            choices_[i] = {};
            if (c.temperatures) choices_[i] = {c.temperatures[i], c.top_p[i], c.min_p[i], c.top_k[i], c.uniform[i]};
            if (choices_[i].is_random()) random_.push_back((int)i);
        }
        size_t blocks = logits.num_rows * logits.num_blocks();
        maxima_.resize(blocks);
        sums_.resize(blocks);
        likely_.resize(blocks);
        team::run(team, this);
    }

    int num_phases() const override { return 3; }

    int num_chunks(int phase) const override {
        if (phase == 2) return (int)logits_.num_rows;
        return (int)(phase == 0 ? logits_.num_rows : random_.size()) * logits_.num_blocks();
    }

    void compute(int phase, int chunk, int thread) override {
        if (phase == 2) {
            tokens_[chunk] = choose(chunk, thread);
            return;
        }
        int row = chunk / logits_.num_blocks(), block = chunk % logits_.num_blocks();
        if (phase == 0) {
            int64_t begin = logits_.begin(block), end = logits_.end(block);
            maxima_[chunk] = bits_[row] ? mask_and_find_largest(row_of(row), begin, end) : largest_of(row_of(row), begin, end);
            return;
        }
        weigh(random_[row], block);
    }

  private:
    static constexpr float LIKELY = 1.0f / 16384;  // of the largest weight: those that are kept while weighing
    static constexpr int64_t FEW = 256;
    static constexpr size_t MOST_LIKELY = 256;  // kept of a block; a block with more is read again

    Row row_of(int row) const { return {logits_.row(row), bits_[row]}; }

    size_t place(int row, int block) const { return (size_t)row * logits_.num_blocks() + block; }

    // Of a masked row `maxima_` has what is above BANNED. Where there is nothing, the largest of what is banned counts.
    float largest_of_row(int row) const {
        const float* first = &maxima_[place(row, 0)];
        float most = *std::max_element(first, first + logits_.num_blocks());
        return has_choice(row, most) ? most : largest_of(row_of(row), 0, logits_.vocabulary);
    }

    bool has_choice(int row, float most) const { return !bits_[row] || most > BANNED; }

    // The sum of a block's weights, and where the row is cut its likely tokens.
    void weigh(int row, int block) {
        const Choice& choice = choices_[row];
        bool is_cut = choice.is_cut(logits_.vocabulary);
        std::vector<uint64_t>& likely = likely_[place(row, block)];
        likely.clear();
        Sum sum;
        float least = is_cut ? 0 : choice.min_p;
        each_weight(row, block, [&](int64_t at, Floats weight) {
            sum.add(weight >= least ? weight : Floats{});
            if (is_cut && any(weight >= LIKELY) && likely.size() <= MOST_LIKELY)
                for (int i = 0; i < LANES; i++)
                    if (weight[i] >= LIKELY) likely.push_back(key_of(weight[i], at + i));
        });
        sums_[place(row, block)] = sum.total();
    }

    template <class Use> void each_weight(int row, int block, Use use) const {
        for_weights(row_of(row), logits_.begin(block), logits_.end(block), largest_of_row(row),
                    choices_[row].temperature, use);
    }

    int64_t choose(int row, int thread) {
        const Choice& choice = choices_[row];
        if (!choice.is_random()) return first_of(row, largest_of_row(row));
        double total = 0;
        for (int block = 0; block < logits_.num_blocks(); block++) total += sums_[place(row, block)];
        if (!choice.is_cut(logits_.vocabulary)) return sample_in_order(row, total);
        std::vector<uint64_t>& keys = keys_[thread];
        bool is_among = gather_likely(row, total, keys);
        if (!is_among) {
            if (choice.top_k == 0 || choice.top_k > FEW) return sample_ranked(rank(row, rankings_[thread]), total, choice);
            gather_best(row, keys);
        }
        sort_keys(keys, spares_[thread]);
        return sample_sorted(keys, total, choice);
    }

    // The first token with this logit.
    int64_t first_of(int row, float most) const {
        int block = 0;
        while (has_choice(row, most) && maxima_[place(row, block)] != most) block++;
        for (int64_t at = logits_.begin(block); at < logits_.vocabulary; at += LANES) {
            Floats x = load_logits(row_of(row), at, logits_.vocabulary);
            if (!any(x == most)) continue;
            for (int i = 0; i < LANES; i++)
                if (x[i] == most) return at + i;
        }
        return 0;  // not reached: the row has it
    }

    // The first token at which the running sum passes uniform * total, in the order of the vocabulary.
    int64_t sample_in_order(int row, double total) const {
        double target = choices_[row].uniform * total, sum = 0;
        int block = 0, last = logits_.num_blocks() - 1;
        while (block < last && sum + sums_[place(row, block)] <= target) sum += sums_[place(row, block++)];
        while (sums_[place(row, block)] == 0) block--;  // rounding has passed the last weight
        int64_t found = -1, possible = 0;
        float least = choices_[row].min_p;
        each_weight(row, block, [&](int64_t at, Floats weight) {
            if (found >= 0 || !any(weight > 0.0f)) return;
            for (int i = 0; i < LANES && found < 0; i++) {
                if (!(weight[i] > 0) || weight[i] < least) continue;
                possible = at + i;
                sum += weight[i];
                if (sum > target) found = possible;
            }
        });
        return found >= 0 ? found : possible;
    }

    // The likely tokens. False: the choice is not among them for certain.
    bool gather_likely(int row, double total, std::vector<uint64_t>& keys) const {
        const Choice& choice = choices_[row];
        keys.clear();
        for (int block = 0; block < logits_.num_blocks(); block++) {
            const auto& likely = likely_[place(row, block)];
            if (likely.size() > MOST_LIKELY) return false;
            keys.insert(keys.end(), likely.begin(), likely.end());
        }
        if (choice.top_k > 0) return keys.size() >= (size_t)choice.top_k;
        double sum = 0;
        for (uint64_t key : keys) sum += value_of(key);
        return sum >= total * choice.top_p;
    }

    // The `top_k` largest: a confident model leaves few of them likely.
    void gather_best(int row, std::vector<uint64_t>& keys) const {
        const Choice& choice = choices_[row];
        find_best(row_of(row), 0, logits_.vocabulary, choice.top_k, keys);
        float most = value_of(keys[0]);
        for (uint64_t& key : keys) {
            Floats weight = weights_of(broadcast(value_of(key)), most, choice.temperature);
            key = key_of(weight[0], id_of(key));
        }
    }

    Ranking& rank(int row, Ranking& ranking) const {
        ranking.fill(logits_.vocabulary, [&](int64_t begin, int64_t end, auto use) {
            for_weights(row_of(row), begin, end, largest_of_row(row), choices_[row].temperature, use);
        });
        return ranking;
    }

    Logits logits_{};
    int64_t* tokens_ = nullptr;
    std::vector<const uint32_t*> bits_;  // by row, of masks; null: all tokens may be chosen
    std::vector<Choice> choices_;
    std::vector<int> random_;  // rows
    std::vector<float> maxima_;  // [rows, blocks]
    std::vector<double> sums_;  // [rows, blocks]
    std::vector<std::vector<uint64_t>> likely_;  // [rows, blocks]
    std::vector<std::vector<uint64_t>> keys_, spares_;  // by thread
    std::vector<Ranking> rankings_;  // by thread
};

}  // namespace sampling
