// The recurrence of one head over the tokens of one row: the gated delta rule, or the scan of Mamba 2.
//
// Both keep a state S of keys by values and take from a token a key k, a query q, a value v, a decay and what is written, w:
//
//     S = decay * S + k w^T,    out = q S        scan: w = rate * v        delta rule: w = rate * (v - decay * k S)
//
// Token by token a state is read once and written once, where it lies if it is float32. By blocks the tokens of a block see
// one another's keys through products of matrices (the WY form of the delta rule: what they write is the solution of a
// triangular system), and the state through two more; it stays in the cache of a core from block to block.
#pragma once

#include <vector>

#include "recurrent.h"

namespace recurrent {

constexpr int TOKENS = 32;  // of a block

inline int whole(int size) { return (size + LANES - 1) / LANES * LANES; }

// Memory of one thread. Rows are as wide as whole vectors, zeros behind the numbers.
struct Scratch {
    int keys, values;  // widths: of a row of keys, of values
    float *state;      // [key_dim][values]
    float *inputs;     // [2 * TOKENS][keys]: keys, then queries
    float *turned;     // [key_dim][TOKENS]: the keys
    float *among;      // [2 * TOKENS][TOKENS]: products of keys and queries with keys
    float *found;      // [2 * TOKENS][values]: products of keys and queries with the state; then the outputs
    float *written;    // [TOKENS][values]
    float *fading;     // [TOKENS][keys]: keys, as decayed as they are at the block's end

    static int64_t floats(const Layer& layer) {
        int64_t keys = whole(layer.key_dim), values = whole(layer.value_dim);
        return keys * values + 2 * TOKENS * keys + keys * TOKENS + 2 * TOKENS * TOKENS + 3 * TOKENS * values + TOKENS * keys +
               keys + values;
    }

    Scratch(const Layer& layer, float* memory) : keys(whole(layer.key_dim)), values(whole(layer.value_dim)) {
        auto take = [&](int64_t count) { float* at = memory; memory += count; return at; };
        state = take((int64_t)keys * values + keys + values);  // also [value_dim][keys]
        inputs = take((int64_t)2 * TOKENS * keys);
        turned = take((int64_t)keys * TOKENS);
        among = take(2 * TOKENS * TOKENS);
        found = take((int64_t)2 * TOKENS * values);
        written = take((int64_t)TOKENS * values);
        fading = take((int64_t)TOKENS * keys);
    }
};

inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// What a token brings to a head: log of its decay, and its rate.
struct Rates { float log_decay, rate; };

inline Rates rates_of(const Layer& layer, const Tokens& tokens, int head, int64_t token) {
    float step = softplus(number(line(tokens.step, token), tokens.step.kind, head) + layer.step_bias[head]);
    float fade = -expf(layer.log_decay[head]);
    if (layer.is_delta) return {fade * step, 1.0f / (1.0f + expf(-number(line(tokens.rate, token), tokens.rate.kind, head)))};
    step = step < layer.least_step ? layer.least_step : step > layer.most_step ? layer.most_step : step;
    return {fade * step, step};
}

inline void unit_length(float* x, int width, float scale) {
    Floats squares{};
    for (int i = 0; i < width; i += LANES) squares += load<Floats>(x + i) * load<Floats>(x + i);
    scale /= sqrtf(sum(squares) + 1e-6f);
    for (int i = 0; i < width; i += LANES) store(x + i, load<Floats>(x + i) * scale);
}

// Key, query and value of a token, zeros behind them; those of the delta rule have length 1, queries 1 / sqrt(key_dim).
inline void inputs_of(const Layer& layer, const Tokens& tokens, int head, int64_t token, const Scratch& s, float* key,
                      float* query, float* value) {
    const float* row = tokens.convolved + token * channels(layer);
    int shared = layer.value_heads / layer.key_heads, own = head / shared * layer.key_dim, keys = layer.key_heads * layer.key_dim;
    int inner = layer.value_heads * layer.value_dim;
    const float *queries = layer.is_delta ? row : row + inner + keys, *from = layer.is_delta ? row + keys : row + inner;
    memset(key + layer.key_dim, 0, (s.keys - layer.key_dim) * sizeof(float));
    memset(query + layer.key_dim, 0, (s.keys - layer.key_dim) * sizeof(float));
    memset(value + layer.value_dim, 0, (s.values - layer.value_dim) * sizeof(float));
    memcpy(query, queries + own, layer.key_dim * sizeof(float));
    memcpy(key, from + own, layer.key_dim * sizeof(float));
    memcpy(value, (layer.is_delta ? row + 2 * keys : row) + (int64_t)head * layer.value_dim, layer.value_dim * sizeof(float));
    if (layer.is_delta) {
        unit_length(key, s.keys, 1.0f);
        unit_length(query, s.keys, 1.0f / sqrtf((float)layer.key_dim));
    }
}

// ---- token by token

// One token of the delta rule, N vectors of values from `at` on: S [key_dim][stride], out = q S.
template <int N> inline void delta_part(float* state, int64_t stride, int key_dim, const float* key, const float* query,
                                        const float* value, float decay, float rate, float* out) {
    Floats sums[N] = {};
    for (int r = 0; r < key_dim; r++)
        for (int n = 0; n < N; n++) sums[n] += key[r] * load<Floats>(state + r * stride + n * LANES);
    Floats written[N];
    for (int n = 0; n < N; n++) written[n] = rate * (load<Floats>(value + n * LANES) - decay * sums[n]), sums[n] = Floats{};
    for (int r = 0; r < key_dim; r++)
        for (int n = 0; n < N; n++) {
            Floats x = decay * load<Floats>(state + r * stride + n * LANES) + key[r] * written[n];
            store(state + r * stride + n * LANES, x);
            sums[n] += query[r] * x;
        }
    for (int n = 0; n < N; n++) store(out + n * LANES, sums[n]);
}

inline void delta_token(float* state, int64_t stride, int key_dim, int values, const float* key, const float* query,
                        const float* value, float decay, float rate, float* out) {
    int at = 0;
    for (; at + 8 * LANES <= values; at += 8 * LANES)
        delta_part<8>(state + at, stride, key_dim, key, query, value + at, decay, rate, out + at);
    for (; at + 2 * LANES <= values; at += 2 * LANES)
        delta_part<2>(state + at, stride, key_dim, key, query, value + at, decay, rate, out + at);
    for (; at < values; at += LANES) delta_part<1>(state + at, stride, key_dim, key, query, value + at, decay, rate, out + at);
}

// One token of the scan: S [value_dim][stride], of rows of keys.
inline void scan_token(float* state, int64_t stride, int value_dim, int keys, const float* key, const float* query,
                       const float* value, float decay, float rate, float* out) {
    for (int first = 0; first < value_dim; first += LANES) {
        Floats sums[LANES] = {};
        int count = value_dim - first < LANES ? value_dim - first : LANES;
        for (int p = 0; p < count; p++) {
            float *row = state + (first + p) * stride, written = rate * value[first + p];
            Floats total{};
            for (int n = 0; n < keys; n += LANES) {
                Floats x = decay * load<Floats>(row + n) + written * load<Floats>(key + n);
                store(row + n, x);
                total += x * load<Floats>(query + n);
            }
            sums[p] = total;
        }
        transpose(sums);
        for (int i = 1; i < LANES; i++) sums[0] += sums[i];
        store(out + first, sums[0]);
    }
}

// ---- by blocks

// out[i][:] = scale * out[i][:] + sum over r < depth of a[i * row + r * column] * b[r][:] for ROWS rows, N vectors.
template <int ROWS, int N> inline void product_part(int depth, const float* a, int64_t row, int64_t column, const float* b,
                                                    int64_t b_stride, float scale, float* out, int64_t out_stride) {
    Floats sums[ROWS][N];
    for (int i = 0; i < ROWS; i++)
        for (int n = 0; n < N; n++) sums[i][n] = scale == 0 ? Floats{} : scale * load<Floats>(out + i * out_stride + n * LANES);
    for (int r = 0; r < depth; r++) {
        Floats right[N];
        for (int n = 0; n < N; n++) right[n] = load<Floats>(b + r * b_stride + n * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int n = 0; n < N; n++) sums[i][n] += a[i * row + r * column] * right[n];
    }
    for (int i = 0; i < ROWS; i++)
        for (int n = 0; n < N; n++) store(out + i * out_stride + n * LANES, sums[i][n]);
}

constexpr int TILE = LANES == 16 ? 8 : 4;  // rows of a tile of a product
constexpr int WIDE = LANES == 4 ? 4 : 2;   // vectors of one

template <int N> inline void product_columns(int rows, int depth, const float* a, int64_t row, int64_t column, const float* b,
                                             int64_t b_stride, float scale, float* out, int64_t out_stride) {
    int i = 0;
    for (; i + TILE <= rows; i += TILE)
        product_part<TILE, N>(depth, a + i * row, row, column, b, b_stride, scale, out + i * out_stride, out_stride);
    for (; i < rows; i++)
        product_part<1, N>(depth, a + i * row, row, column, b, b_stride, scale, out + i * out_stride, out_stride);
}

inline void product(int rows, int width, int depth, const float* a, int64_t row, int64_t column, const float* b,
                    int64_t b_stride, float scale, float* out, int64_t out_stride) {
    int at = 0;
    for (; at + WIDE * LANES <= width; at += WIDE * LANES)
        product_columns<WIDE>(rows, depth, a, row, column, b + at, b_stride, scale, out + at, out_stride);
    for (; at < width; at += LANES) product_columns<1>(rows, depth, a, row, column, b + at, b_stride, scale, out + at, out_stride);
}

// row -= or += factors[j] * rows[j] for j < count.
template <int SIGN> inline void gather(float* row, int values, const float* factors, int count, const float* rows) {
    for (int at = 0; at < values; at += LANES) {
        Floats x = load<Floats>(row + at);
        for (int j = 0; j < count; j++) x += (SIGN * factors[j]) * load<Floats>(rows + (int64_t)j * values + at);
        store(row + at, x);
    }
}

// `count` tokens whose keys, queries and values are in the scratch (values in `written`). The outputs are in the second
// half of `found`; `log_decays` add up from the block's begin.
inline void advance_block(const Layer& layer, const Scratch& s, int count, const float* log_decays, const float* rates) {
    float* queries = s.inputs + (int64_t)TOKENS * s.keys;
    for (int r = 0; r < layer.key_dim; r++)
        for (int j = 0; j < TOKENS; j++) s.turned[r * TOKENS + j] = j < count ? s.inputs[(int64_t)j * s.keys + r] : 0.0f;
    float *key_scores = s.among, *scores = s.among + TOKENS * TOKENS, *out = s.found + (int64_t)TOKENS * s.values;
    product(count, TOKENS, layer.key_dim, queries, s.keys, 1, s.turned, TOKENS, 0, scores, TOKENS);
    product(count, s.values, layer.key_dim, queries, s.keys, 1, s.state, s.values, 0, out, s.values);
    if (layer.is_delta) {
        product(count, TOKENS, layer.key_dim, s.inputs, s.keys, 1, s.turned, TOKENS, 0, key_scores, TOKENS);
        product(count, s.values, layer.key_dim, s.inputs, s.keys, 1, s.state, s.values, 0, s.found, s.values);
    }
    for (int i = 0; i < count; i++) {
        float within[TOKENS], decay = expf(log_decays[i]), *row = s.written + (int64_t)i * s.values;
        for (int j = 0; j < TOKENS; j += LANES) {  // those behind the token are not used
            Floats logs{};
            memcpy(&logs, log_decays + j, sizeof logs);
            store(within + j, exponential(log_decays[i] - logs));
        }
        for (int j = 0; j <= i; j++) scores[i * TOKENS + j] *= within[j];
        if (layer.is_delta) {
            for (int j = 0; j < i; j++) key_scores[i * TOKENS + j] *= within[j] * rates[i];
            for (int at = 0; at < s.values; at += LANES) {
                Floats seen = load<Floats>(s.found + (int64_t)i * s.values + at);
                store(row + at, rates[i] * (load<Floats>(row + at) - decay * seen));
            }
            gather<-1>(row, s.values, key_scores + i * TOKENS, i, s.written);
        } else {
            for (int at = 0; at < s.values; at += LANES) store(row + at, rates[i] * load<Floats>(row + at));
        }
        float* own = out + (int64_t)i * s.values;
        for (int at = 0; at < s.values; at += LANES) store(own + at, decay * load<Floats>(own + at));
        gather<1>(own, s.values, scores + i * TOKENS, i + 1, s.written);
    }
    float last = log_decays[count - 1];
    for (int j = 0; j < count; j++) {
        float fades = expf(last - log_decays[j]);
        for (int r = 0; r < s.keys; r += LANES)
            store(s.fading + (int64_t)j * s.keys + r, fades * load<Floats>(s.inputs + (int64_t)j * s.keys + r));
    }
    product(layer.key_dim, s.values, count, s.fading, 1, s.keys, s.written, s.values, expf(last), s.state, s.values);
}

// ---- one row of one head

inline char* state_of(const Layer& layer, int64_t slot, int head) {
    int64_t size = (int64_t)layer.key_dim * layer.value_dim;
    return layer.state + (slot * layer.value_heads + head) * size * step::bytes_of((Number)layer.state_kind);
}

// A state in memory has `rows` of `width` numbers; in the scratch they lie `stride` apart, turned if `turns`.
inline void load_state(const char* from, int kind, int rows, int width, int64_t stride, bool turns, float* to) {
    alignas(64) float part[1024];
    if (turns) memset(to, 0, (int64_t)width * stride * sizeof(float));
    for (int i = 0; i < rows; i++) {
        float* row = turns ? part : to + i * stride;
        read_numbers(from + (int64_t)i * width * step::bytes_of((Number)kind), kind, width, row);
        if (turns)
            for (int j = 0; j < width; j++) to[j * stride + i] = part[j];
        else
            for (int j = width; j < stride; j++) row[j] = 0;
    }
}

inline void store_state(char* to, int kind, int rows, int width, int64_t stride, bool turns, const float* from) {
    alignas(64) float part[1024];
    for (int i = 0; i < rows; i++) {
        const float* row = turns ? part : from + i * stride;
        if (turns)
            for (int j = 0; j < width; j++) part[j] = from[j * stride + i];
        write_numbers(to + (int64_t)i * width * step::bytes_of((Number)kind), kind, width, row);
    }
}

inline void put_output(const Layer& layer, const Tokens& tokens, int head, int64_t token, const float* from) {
    if (!tokens.out) return;
    float* to = tokens.out + (token * layer.value_heads + head) * layer.value_dim;
    memcpy(to, from, layer.value_dim * sizeof(float));
    if (!layer.skip) return;
    const float* value = tokens.convolved + token * channels(layer) + (int64_t)head * layer.value_dim;
    for (int i = 0; i < layer.value_dim; i++) to[i] += layer.skip[head] * value[i];
}

inline void row_by_blocks(const Layer& layer, const Rows& rows, const Tokens& tokens, int row, int head, const Scratch& s) {
    int height = layer.is_delta ? layer.key_dim : layer.value_dim, width = layer.is_delta ? layer.value_dim : layer.key_dim;
    load_state(state_of(layer, rows.slots[row], head), layer.state_kind, height, width, s.values, !layer.is_delta, s.state);
    float log_decays[TOKENS] = {}, rates[TOKENS];
    for (int64_t first = 0; first < rows.counts[row]; first += TOKENS) {
        int64_t token = rows.begins[row] + first, left = rows.counts[row] - first;
        int count = left < TOKENS ? (int)left : TOKENS;
        float total = 0;
        for (int i = 0; i < count; i++) {
            inputs_of(layer, tokens, head, token + i, s, s.inputs + (int64_t)i * s.keys,
                      s.inputs + (int64_t)(TOKENS + i) * s.keys, s.written + (int64_t)i * s.values);
            Rates own = rates_of(layer, tokens, head, token + i);
            log_decays[i] = total += own.log_decay;
            rates[i] = own.rate;
        }
        advance_block(layer, s, count, log_decays, rates);
        for (int i = 0; i < count; i++) put_output(layer, tokens, head, token + i, s.found + (int64_t)(TOKENS + i) * s.values);
    }
    if (rows.targets[row] >= 0)
        store_state(state_of(layer, rows.targets[row], head), layer.state_kind, height, width, s.values, !layer.is_delta, s.state);
}

inline void row_by_tokens(const Layer& layer, const Rows& rows, const Tokens& tokens, int row, int head, const Scratch& s) {
    int height = layer.is_delta ? layer.key_dim : layer.value_dim, width = layer.is_delta ? layer.value_dim : layer.key_dim;
    int64_t stride = layer.is_delta ? s.values : s.keys;
    char* from = state_of(layer, rows.slots[row], head);
    bool in_place = rows.targets[row] == rows.slots[row] && layer.state_kind == step::FLOAT32 && stride == width;
    float *state = in_place ? (float*)from : s.state, *key = s.inputs, *query = s.inputs + s.keys, *value = s.written;
    if (!in_place) load_state(from, layer.state_kind, height, width, stride, false, state);
    for (int64_t t = 0; t < rows.counts[row]; t++) {
        int64_t token = rows.begins[row] + t;
        inputs_of(layer, tokens, head, token, s, key, query, value);
        Rates own = rates_of(layer, tokens, head, token);
        float decay = expf(own.log_decay);
        if (layer.is_delta) delta_token(state, stride, layer.key_dim, s.values, key, query, value, decay, own.rate, s.found);
        else scan_token(state, stride, layer.value_dim, s.keys, key, query, value, decay, own.rate, s.found);
        put_output(layer, tokens, head, token, s.found);
    }
    if (!in_place && rows.targets[row] >= 0)
        store_state(state_of(layer, rows.targets[row], head), layer.state_kind, height, width, stride, false, state);
}

// A row and a head of it: chunk row * value_heads + head.
inline void recur_chunk(const Layer& layer, const Rows& rows, const Tokens& tokens, int chunk, float* memory) {
    int row = chunk / layer.value_heads, head = chunk % layer.value_heads;
    Scratch scratch(layer, memory);
    if (rows.by_blocks[row]) row_by_blocks(layer, rows, tokens, row, head, scratch);
    else row_by_tokens(layer, rows, tokens, row, head, scratch);
}

// The memory of each thread for Scratch.
class Scratches {
  public:
    explicit Scratches(int num_threads) : memory_(num_threads, nullptr) {}
    ~Scratches() {
        for (float* memory : memory_) free(memory);
    }
    Scratches(const Scratches&) = delete;

    // For layers of this shape, and smaller ones. False: there is no memory.
    bool reserve(const Layer& layer) {
        int64_t floats = Scratch::floats(layer);
        if (floats <= floats_) return true;
        floats_ = 0;
        for (float*& memory : memory_) {
            free(memory);
            memory = (float*)step::allocate(floats * sizeof(float));
            if (!memory) return false;
        }
        floats_ = floats;
        return true;
    }

    float* of(int thread) const { return memory_[thread]; }

  private:
    std::vector<float*> memory_;
    int64_t floats_ = 0;
};

}  // namespace recurrent
