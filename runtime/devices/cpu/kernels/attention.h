// Causal attention over the pages of the key/value cache, in place: nothing is gathered.
//
// A chunk is a few queries of one row with all query heads of one key/value head. It goes through the keys in spans of
// SPAN, which begin at multiples of SPAN whatever the step, with the softmax of Milakov and Gimelshein (2018). So a
// query's result depends neither on the other queries of its step nor on how its prompt was cut.
#pragma once

#include <vector>

#include "layers.h"

namespace attention {

using namespace simd;
using layers::Heads;
using step::Buffer;
using step::Number;
using step::Phase;
using step::Step;

constexpr int SPAN = 64;          // keys at a time
constexpr int MAX_VECTORS = 64;   // queries times heads of a chunk
constexpr int MAX_DIM = 256;
constexpr float HIDDEN = -1e30f;  // the score of a key that a query does not see
constexpr int TILE = 4;           // queries that share a load of a key or value

struct Tile {  // queries of one row
    int row, first, count;
};

// One thread's memory.
struct Scratch {
    alignas(64) float queries[MAX_VECTORS][MAX_DIM];
    alignas(64) float out[MAX_VECTORS][MAX_DIM];
    alignas(64) float scores[MAX_VECTORS][SPAN];
    alignas(64) float keys[MAX_DIM][LANES];  // turned: a lane is a key
    alignas(64) float values[SPAN][MAX_DIM];
    float most[MAX_VECTORS], total[MAX_VECTORS];
    int64_t positions[MAX_VECTORS];
};

// The memory of all threads, which the layers of a program share.
class Scratches {
  public:
    explicit Scratches(int num_threads) : each_(num_threads) {
        for (auto& scratch : each_) scratch = (Scratch*)step::allocate(sizeof(Scratch));
    }
    ~Scratches() {
        for (auto* scratch : each_) free(scratch);
    }
    Scratches(const Scratches&) = delete;

    Scratch& of(int thread) const { return *each_[thread]; }

  private:
    std::vector<Scratch*> each_;
};

class Attention final : public Phase {
  public:
    Attention(Buffer* qkv, Buffer* out, const Heads& heads, const Scratches& scratches)
        : qkv_(qkv), out_(out), h_(heads), group_(heads.num_heads / heads.num_kv_heads), scratches_(scratches) {}

    int begin(const Step& step) override {
        tiles_.clear();
        firsts_.clear();
        int at_once = MAX_VECTORS / group_, first = 0;
        for (int row = 0; row < step.num_rows; row++) {
            firsts_.push_back(first);
            for (int i = 0; i < step.counts[row]; i += at_once)
                tiles_.push_back({row, i, step.counts[row] - i < at_once ? step.counts[row] - i : at_once});
            first += step.counts[row];
        }
        return (int)tiles_.size() * h_.num_kv_heads;
    }

    void compute(const Step& step, int chunk, int thread) override {
        const Tile& tile = tiles_[chunk / h_.num_kv_heads];
        int kv_head = chunk % h_.num_kv_heads;
        Scratch& s = scratches_.of(thread);
        int count = take_queries(step, tile, kv_head, s);
        int64_t last = step.starts[tile.row] + tile.first + tile.count - 1;
        int64_t first = h_.window ? step.starts[tile.row] + tile.first - h_.window + 1 : 0;
        if (first < 0) first = 0;
        for (int64_t span = first / SPAN * SPAN; span <= last; span += SPAN) {
            int seen = (int)(last - span + 1 < SPAN ? last - span + 1 : SPAN);
            score(step, tile, kv_head, span, seen, count, s);
            for (int i = 0; i < count; i++) soften(span, s, i);
            load_values(step, tile, kv_head, span, seen, first, s);
            for (int i = 0; i < count; i += TILE) add_values(s, i, count - i < TILE ? count - i : TILE, seen);
        }
        give_results(tile, kv_head, count, s);
    }

  private:
    int take_queries(const Step& step, const Tile& tile, int kv_head, Scratch& s) {
        int count = 0;
        for (int i = 0; i < tile.count; i++) {
            const float* heads = qkv_->row(firsts_[tile.row] + tile.first + i);
            for (int g = 0; g < group_; g++, count++) {
                memcpy(s.queries[count], heads + (size_t)(kv_head * group_ + g) * h_.dim, h_.dim * sizeof(float));
                memset(s.out[count], 0, h_.dim * sizeof(float));
                s.most[count] = HIDDEN;
                s.total[count] = 0;
                s.positions[count] = step.starts[tile.row] + tile.first + i;
            }
        }
        return count;
    }

    const char* cached(const char* cache, const Step& step, int row, int64_t position, int kv_head) const {
        const int32_t* table = step.page_tables[h_.pool] + step.slots[row] * step.pages_per_slot;
        int64_t location = table[position / step.page_size] * step.page_size + position % step.page_size;
        return cache + ((size_t)location * h_.num_kv_heads + kv_head) * h_.dim * step::bytes_of(h_.kind);
    }

    // Products of all queries with the keys of a span. Behind the last key that one of them sees nothing is read.
    void score(const Step& step, const Tile& tile, int kv_head, int64_t span, int seen, int count, Scratch& s) {
        int bytes = step::bytes_of(h_.kind);
        int64_t oldest = h_.window ? s.positions[0] - h_.window + 1 : 0;
        for (int block = 0; block < SPAN; block += LANES) {
            if (block >= seen) break;
            const char* keys[LANES];
            const char* known = nullptr;  // pages outside the window or behind the end may not exist
            for (int i = 0; i < LANES; i++) {
                int64_t position = span + block + i;
                bool exists = block + i < seen && position >= oldest;
                keys[i] = exists ? cached(h_.k_cache, step, tile.row, position, kv_head) : nullptr;
                if (exists) known = keys[i];
            }
            if (!known) {
                for (int i = 0; i < count; i++) store(&s.scores[i][block], broadcast(0.0f));
                continue;
            }
            for (int d = 0; d < h_.dim; d += LANES) {
                Floats square[LANES];
                for (int i = 0; i < LANES; i++)
                    square[i] = step::load_number((keys[i] ? keys[i] : known) + (size_t)d * bytes, h_.kind);
                transpose(square);
                for (int i = 0; i < LANES; i++) store(s.keys[d + i], square[i]);
            }
            for (int i = 0; i < count; i += TILE) multiply_keys(s, i, count - i < TILE ? count - i : TILE, block);
        }
    }

    void multiply_keys(Scratch& s, int first, int count, int block) {
        Floats sums[TILE] = {};
        for (int d = 0; d < h_.dim; d++) {
            Floats keys = load<Floats>(s.keys[d]);
            for (int i = 0; i < TILE; i++) sums[i] += broadcast(s.queries[first + (i < count ? i : 0)][d]) * keys;
        }
        for (int i = 0; i < count; i++) store(&s.scores[first + i][block], sums[i]);
    }

    // Scores of one query to weights, and what it has so far to the new largest score.
    void soften(int64_t span, Scratch& s, int i) {
        int64_t position = s.positions[i];
        int64_t oldest = h_.window ? position - h_.window + 1 : 0;
        if (span > position || span + SPAN <= oldest) {
            memset(s.scores[i], 0, sizeof s.scores[i]);
            return;
        }
        Floats most = broadcast(s.most[i]);
        Ints lanes;
        for (int k = 0; k < LANES; k++) lanes[k] = k;
        for (int k = 0; k < SPAN; k += LANES) {
            Floats x = load<Floats>(&s.scores[i][k]) * h_.scale;
            if (h_.cap != 0) x = h_.cap * hyperbolic_tangent(x * (1.0f / h_.cap));
            Ints places = lanes + k;
            Ints is_seen = (places <= (int)(position - span < SPAN ? position - span : SPAN)) &
                           (places >= (int)(oldest > span ? oldest - span : 0));
            x = is_seen ? x : broadcast(HIDDEN);
            store(&s.scores[i][k], x);
            most = max(most, x);
        }
        float largest_now = largest(most);
        if (largest_now > s.most[i]) {
            float scale = exponential(broadcast(s.most[i] - largest_now))[0];
            s.total[i] *= scale;
            for (int d = 0; d < h_.dim; d += LANES) store(&s.out[i][d], load<Floats>(&s.out[i][d]) * scale);
            s.most[i] = largest_now;
        }
        Floats sums{};
        for (int k = 0; k < SPAN; k += LANES) {
            Floats weight = exponential(load<Floats>(&s.scores[i][k]) - largest_now);
            store(&s.scores[i][k], weight);
            sums += weight;
        }
        s.total[i] += sum(sums);
    }

    void load_values(const Step& step, const Tile& tile, int kv_head, int64_t span, int seen, int64_t first, Scratch& s) {
        int bytes = step::bytes_of(h_.kind);
        for (int i = 0; i < seen; i++) {
            if (span + i < first) {
                memset(s.values[i], 0, h_.dim * sizeof(float));
                continue;
            }
            const char* from = cached(h_.v_cache, step, tile.row, span + i, kv_head);
            for (int d = 0; d < h_.dim; d += LANES)
                store(&s.values[i][d], step::load_number(from + (size_t)d * bytes, h_.kind));
        }
    }

    // out += weights times values, for up to TILE queries and four vectors at a time.
    void add_values(Scratch& s, int first, int count, int seen) {
        for (int d = 0; d < h_.dim; d += LANES) {
            Floats sums[TILE];
            for (int i = 0; i < TILE; i++) sums[i] = load<Floats>(&s.out[first + (i < count ? i : 0)][d]);
            for (int k = 0; k < seen; k++) {
                Floats values = load<Floats>(&s.values[k][d]);
                for (int i = 0; i < TILE; i++) sums[i] += broadcast(s.scores[first + (i < count ? i : 0)][k]) * values;
            }
            for (int i = 0; i < count; i++) store(&s.out[first + i][d], sums[i]);
        }
    }

    void give_results(const Tile& tile, int kv_head, int count, Scratch& s) {
        for (int i = 0; i < count; i++) {
            int head = kv_head * group_ + i % group_;
            float total = s.total[i], scale = 1;
            if (h_.sinks) {  // a score without a value (Xiao et al., 2023)
                float most = h_.sinks[head] > s.most[i] ? h_.sinks[head] : s.most[i];
                scale = exponential(broadcast(s.most[i] - most))[0];
                total = total * scale + exponential(broadcast(h_.sinks[head] - most))[0];
            }
            float* to = out_->row(firsts_[tile.row] + tile.first + i / group_) + (size_t)head * h_.dim;
            for (int d = 0; d < h_.dim; d += LANES) store(to + d, load<Floats>(&s.out[i][d]) * (scale / total));
        }
    }

    Buffer* qkv_;
    Buffer* out_;
    const Heads h_;
    const int group_;
    const Scratches& scratches_;
    std::vector<Tile> tiles_;
    std::vector<int> firsts_;  // for each row, its first token in the step
};

}  // namespace attention
