// What one thread computes of attention: products of some queries with a part of the keys, their weights, and the
// weighted sums of values.
//
// A part is PART keys, which begin at a multiple of PART whatever the step. A query has a softmax of its own in each part,
// and parts are joined in order, from the first to the last (Milakov and Gimelshein, 2018). So a query's result depends
// neither on the other queries, nor on how its prompt was cut, nor on which threads compute the parts.
//
// Caches in bfloat16 are multiplied in pairs where the CPU does that: queries and weights are rounded to bfloat16, and
// sums are float32. Else all is float32.
#pragma once

#include "cache.h"
#include "functions.h"

namespace scores {

using namespace simd;
using cache::Cache;
using cache::MAX_DIM;
using step::Number;
using step::Step;

constexpr int PART = 256;        // keys that share a softmax
constexpr int KEYS = 2 * LANES;  // keys whose products are computed together
constexpr int VALUES = 64;       // values at a time
constexpr int MAX_VECTORS = 64;  // queries times heads of a tile
constexpr int TILE = LANES == 8 ? 4 : 8;  // queries that share a load of keys or values, as registers allow
constexpr float HIDDEN = -1e30f;          // the score of a key that a query does not see

// Numbers of keys and values are padded with zeros.
constexpr int padded(int dim) { return (dim + KEYS - 1) / KEYS * KEYS; }

// What a layer attends to, and how. A key may be stored in two pieces.
struct Layer {
    Cache keys[2];
    int num_pieces = 1;
    Cache values;
    Number kind;  // of the caches
    int pool;
    int num_heads, num_kv_heads;
    float scale, cap;  // scores become cap * tanh(scale * product / cap); 0: no cap
    int window;        // 0: all tokens before
    const float* sinks;  // [heads], null: none
    const float* slopes;  // [heads]: a score loses this times the key's distance from the query; null: nothing
    float value_scale = 1;  // of what is in the cache

    int group() const { return num_heads / num_kv_heads; }
    int key_width() const { return padded(keys[0].dim) + (num_pieces > 1 ? padded(keys[1].dim) : 0); }
    int value_width() const { return padded(values.dim); }
};

// Queries of one row by heads that share a key/value head: `vectors` are [count, heads].
struct Tile {
    int row, first, count;      // queries of the row
    int first_head, num_heads;  // of the group
    int64_t oldest, last;       // positions that one of them sees

    int vectors() const { return count * num_heads; }
    int first_part() const { return (int)(oldest / PART); }
    int num_parts() const { return (int)(last / PART) - first_part() + 1; }
};

// The softmax of a query so far: sums of weighted values, the largest score, and the sum of weights.
struct Sums {
    float* out;
    float most, total;
};

// One thread's memory. Numbers are floats, or pairs of bfloat16 in half the space.
struct Scratch {
    alignas(64) float queries[MAX_VECTORS * MAX_DIM];
    alignas(64) float keys[MAX_DIM * KEYS];  // turned: a lane is a key
    alignas(64) float scores[MAX_VECTORS * PART];
    alignas(64) uint16_t weights[MAX_VECTORS * PART];  // of pairs
    alignas(64) float values[VALUES * MAX_DIM];
    alignas(64) float part[MAX_VECTORS * MAX_DIM];  // weighted sums of a part
    alignas(64) float out[MAX_VECTORS * MAX_DIM];   // and of all parts
    float part_most[MAX_VECTORS], part_total[MAX_VECTORS];
    Sums sums[MAX_VECTORS];
    int64_t locations[PART + KEYS];  // of a part, and of the first keys behind it
};

// out [COUNT][KEYS] = a [COUNT][length] b [length][KEYS], or added to it: sums run over `length` in order whatever
// COUNT is. Strides in bytes.
template <bool PAIRS, int COUNT>
inline void multiply(const char* a, size_t a_stride, const char* b, size_t b_stride, int length, float* out,
                     size_t out_stride, bool adds) {
    Floats sums[COUNT][2];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * COUNT; i++)
        sums[i / 2][i % 2] = adds ? load<Floats>((char*)out + i / 2 * out_stride + i % 2 * sizeof(Floats)) : Floats{};
    for (int k = 0; k < length; k++, b += b_stride) {
        Words numbers[2] = {load<Words>(b), load<Words>(b + sizeof(Words))};
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) {
            Words x = broadcast(load<uint32_t>(a + i * a_stride + (size_t)k * 4));
            for (int v = 0; v < 2; v++) {
                if constexpr (PAIRS) sums[i][v] = dot_bf16(sums[i][v], x, numbers[v]);
                else sums[i][v] += (Floats)x * (Floats)numbers[v];
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * COUNT; i++) store((char*)out + i / 2 * out_stride + i % 2 * sizeof(Floats), sums[i / 2][i % 2]);
}

template <bool PAIRS, int COUNT = TILE>
inline void multiply_rows(int count, const char* a, size_t a_stride, const char* b, size_t b_stride, int length,
                          float* out, size_t out_stride, bool adds) {
    if (count == COUNT) return multiply<PAIRS, COUNT>(a, a_stride, b, b_stride, length, out, out_stride, adds);
    if constexpr (COUNT > 1)
        multiply_rows<PAIRS, COUNT - 1>(count, a, a_stride, b, b_stride, length, out, out_stride, adds);
}

// The scores [stop] of a query to weights. It sees the keys [begin, end) of the part; others get the weight 0. `place` of
// the query in the part, and `slope` of its head: linear biases by distance (ALiBi, Press et al., 2022).
inline void soften(float* scores, int begin, int end, int stop, int64_t place, float slope, const Layer& layer,
                   float* most_of, float* total_of) {
    int from = begin / LANES * LANES;
    Ints lanes;
    for (int k = 0; k < LANES; k++) lanes[k] = k;
    Floats most = broadcast(HIDDEN), total{};
    int plain = from == begin && layer.cap == 0 && slope == 0 ? end / LANES * LANES : from;  // scaled and no more up to here
    for (int k = from; k < plain; k += LANES) {
        Floats x = load<Floats>(scores + k) * layer.scale;
        store(scores + k, x);
        most = max(most, x);
    }
    for (int k = plain; k < end; k += LANES) {
        Floats x = load<Floats>(scores + k) * layer.scale;
        if (layer.cap != 0) x = layer.cap * hyperbolic_tangent(x * (1.0f / layer.cap));
        Ints places = lanes + k;
        if (slope != 0) x += slope * floats(places - (int32_t)place);
        x = ((places >= begin) & (places < end)) ? x : broadcast(HIDDEN);
        store(scores + k, x);
        most = max(most, x);
    }
    *most_of = largest(most);
    for (int k = 0; k < stop; k += LANES) {
        bool is_seen = k >= from && k < end;
        Floats weight = is_seen ? exponential(load<Floats>(scores + k) - *most_of) : Floats{};
        store(scores + k, weight);
        if (is_seen) total += weight;
    }
    *total_of = sum(total);
}

// Joins the sums of a part to those of the parts before it. Not inlined, so that all callers compute the same bits.
__attribute__((noinline)) void join(Sums& sums, const float* out, float most, float total, int width) {
    if (total == 0) return;  // the query sees nothing of the part
    float largest_now = most > sums.most ? most : sums.most;
    float old = exponential(broadcast(sums.most - largest_now))[0], now = exponential(broadcast(most - largest_now))[0];
    for (int d = 0; d < width; d += LANES)
        store(sums.out + d, load<Floats>(sums.out + d) * old + load<Floats>(out + d) * now);
    sums.total = sums.total * old + total * now;
    sums.most = largest_now;
}

// The tile's queries with the part of the keys, for caches of one kind.
template <Number KIND> class Worker {
  public:
    static constexpr bool PAIRS = KIND == step::BFLOAT16 && HAS_BF16_DOT;
    static constexpr int TOGETHER = PAIRS ? 2 : 1;  // numbers of a word
    static constexpr int BYTES = step::bytes_of(KIND);

    Worker(const Layer& layer, Scratch& scratch) : l_(layer), s_(scratch) {}

    // One query, `x` its pieces one after another.
    void take_query(int vector, const float* x) {
        int at = vector * l_.key_width();
        for (int piece = 0; piece < l_.num_pieces; piece++) {
            int dim = l_.keys[piece].dim;
            for (int d = 0; d < padded(dim); d += LANES) {
                Floats part = cache::load_first<step::FLOAT32>((const char*)(x + d), dim - d < 0 ? 0 : dim - d);
                if constexpr (PAIRS) store_bf16_input((uint16_t*)s_.queries + at + d, part);
                else store(s_.queries + at + d, part);
            }
            at += padded(dim);
            x += dim;
        }
    }

    // Fills s.part, s.part_most and s.part_total for part `part`; `positions` is that of the tile's first query.
    void compute(const Step& step, const Tile& tile, int kv_head, int part, int64_t position) {
        int64_t origin = (int64_t)part * PART;
        int begin = tile.oldest > origin ? (int)(tile.oldest - origin) / KEYS * KEYS : 0;
        int end = tile.last - origin + 1 < PART ? (int)(tile.last - origin + 1) : PART;
        int stop = (end + KEYS - 1) / KEYS * KEYS;
        cache::locate(step, l_.pool, tile.row, origin + begin, origin + stop + KEYS, tile.oldest, tile.last,
                      s_.locations + begin);
        for (int block = begin; block < stop; block += KEYS) score(tile.vectors(), kv_head, block);
        for (int i = 0; i < tile.vectors(); i++) {
            int head = kv_head * l_.group() + tile.first_head + i % tile.num_heads;
            int64_t query = position + i / tile.num_heads;
            weigh(i, query - origin, step.last_seen(query) - origin, stop, l_.slopes ? l_.slopes[head] : 0);
        }
        for (int block = begin; block < stop; block += VALUES)
            add_values(tile.vectors(), kv_head, block, block + VALUES < stop ? block + VALUES : stop, block == begin);
    }

  private:
    void score(int count, int kv_head, int block) {
        turn_keys(kv_head, block);
        size_t a_stride = (size_t)l_.key_width() * 4 / TOGETHER;
        for (int i = 0; i < count; i += TILE)
            multiply_rows<PAIRS>(count - i < TILE ? count - i : TILE, (const char*)s_.queries + i * a_stride, a_stride,
                                 (const char*)s_.keys, KEYS * 4, l_.key_width() / TOGETHER, s_.scores + i * PART + block,
                                 PART * 4, false);
    }

    // Keys [block, block + KEYS) of the part to s.keys, a word of all keys after another.
    void turn_keys(int kv_head, int block) {
        constexpr int WIDE = LANES * TOGETHER;  // numbers of a vector of words
        float* to = s_.keys;
        for (int piece = 0; piece < l_.num_pieces; piece++) {
            const Cache& keys = l_.keys[piece];
            for (int half = 0; half < 2; half++) {
                const char* rows[LANES];
                for (int i = 0; i < LANES; i++) {
                    int key = block + half * LANES + i;
                    rows[i] = cache::head_of(keys, s_.locations[key], kv_head, BYTES);
                    fetch(keys, s_.locations[key + KEYS], kv_head);
                    if (piece == 0 && l_.values.data != keys.data) fetch(l_.values, s_.locations[key], kv_head);
                }
                for (int d = 0; d < padded(keys.dim); d += WIDE) {
                    Floats square[LANES];
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; i++) square[i] = words(rows[i] + (size_t)d * BYTES, keys.dim - d);
                    transpose(square);
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; i++) store(to + (d / TOGETHER + i) * KEYS + half * LANES, square[i]);
                }
            }
            to += padded(keys.dim) / TOGETHER * KEYS;
        }
    }

    // Asks for what is read soon: pages lie in no order that the CPU could foresee.
    static void fetch(const Cache& cache, int64_t location, int kv_head) {
        const char* at = cache::head_of(cache, location, kv_head, BYTES);
        for (int i = 0; i < cache.dim * BYTES; i += 64) __builtin_prefetch(at + i, 0, 2);
    }

    // LANES words of a row, of which `left` numbers are there.
    static Floats words(const char* at, int left) {
        if constexpr (PAIRS) {
            if (left >= KEYS) return load<Floats>(at);
            char part[sizeof(Floats)] = {};
            memcpy(part, at, left < 0 ? 0 : (size_t)left * BYTES);
            return load<Floats>(part);
        } else {
            return cache::load_first<KIND>(at, left < 0 ? 0 : left);
        }
    }

    // `place` of the query in the part: it sees what is not behind it, and not before its window. Weights of the keys before
    // `stop` are read.
    void weigh(int i, int64_t place, int64_t last, int stop, float slope) {
        int64_t begin = l_.window ? place - l_.window + 1 : 0, end = last + 1;
        begin = begin < 0 ? 0 : begin > PART ? PART : begin;
        end = end < begin ? begin : end > PART ? PART : end;
        float* scores = s_.scores + i * PART;
        soften(scores, (int)begin, (int)end, stop, place, slope, l_, &s_.part_most[i], &s_.part_total[i]);
        if (begin >= end) s_.part_total[i] = 0;
        if constexpr (PAIRS)
            for (int k = 0; k < stop; k += LANES) store_bf16_input(s_.weights + i * PART + k, load<Floats>(scores + k));
    }

    // s.part = (or +=) the weights of keys [begin, end) times their values.
    void add_values(int count, int kv_head, int begin, int end, bool is_first) {
        int width = l_.value_width();
        for (int k = begin; k < end; k += TOGETHER) take_values(kv_head, k, s_.values + (k - begin) / TOGETHER * width);
        const char* weights = PAIRS ? (const char*)s_.weights : (const char*)s_.scores;
        size_t a_stride = PART * 4 / TOGETHER, stride = (size_t)width * 4;
        for (int d = 0; d < width; d += KEYS)
            for (int i = 0; i < count; i += TILE)
                multiply_rows<PAIRS>(count - i < TILE ? count - i : TILE, weights + i * a_stride + begin * 4 / TOGETHER,
                                     a_stride, (const char*)(s_.values + d), stride, (end - begin) / TOGETHER,
                                     s_.part + i * width + d, stride, !is_first);
    }

    // The value of key k as floats, or those of keys k and k + 1 as pairs.
    void take_values(int kv_head, int k, float* to) {
        const char* from = cache::head_of(l_.values, s_.locations[k], kv_head, BYTES);
        const char* next = PAIRS ? cache::head_of(l_.values, s_.locations[k + 1], kv_head, BYTES) : from;
        for (int d = 0; d < l_.value_width(); d += LANES) {
            int left = l_.values.dim - d < 0 ? 0 : l_.values.dim - d;
            Floats first = cache::load_first<KIND>(from + (size_t)d * BYTES, left);
            if constexpr (PAIRS) {
                Words second = (Words)cache::load_first<KIND>(next + (size_t)d * BYTES, left);
                first = (Floats)((Words)first >> 16 | second);
            }
            store(to + d, first);
        }
    }

    const Layer& l_;
    Scratch& s_;
};

}  // namespace scores
