// Recurrent layers: the causal convolution in front of their recurrence, and the gated norm behind it.
//
// A layer is computed in three phases: the convolution of each row's tokens, by blocks of channels; the recurrence, by rows
// and heads (recurrent_heads.h); and the norm, by tokens. A row starts from the states of one slot and leaves them in
// another, the same, or none.
#pragma once

#include <math.h>

#include "functions.h"
#include "step.h"

namespace recurrent {

using namespace simd;
using step::Number;

// library.py declares the same.
struct Layer {
    int is_delta;  // the gated delta rule; else the scan of Mamba 2
    int key_heads, value_heads, key_dim, value_dim;  // of Mamba 2: groups, heads, size of a state, size of a head
    int kernel, activates;  // of the convolution; whether silu follows
    const float *conv_weight, *conv_bias;  // [kernel][channels], [channels] or null
    const float *step_bias, *log_decay, *skip;  // [value_heads] each; skip: null without
    float least_step, most_step;
    const float* norm_weight;  // [norm_period], over and over
    int norm, norm_size, norm_period;  // a row of Norm; numbers of a group
    float eps;
    char* conv_state;  // [slots][channels][kernel - 1]
    int conv_kind;
    char* state;  // [slots][value_heads][key_dim][value_dim], of Mamba 2 [value_dim][key_dim]
    int state_kind;
};

enum Norm { NO_NORM = 0, GATED = 1, BEFORE_GATE = 2, NOTHING = 3 };  // NOTHING: no gate either

// Lines of numbers, one for each token.
struct Lines {
    char* at;
    int64_t stride;  // bytes
    int kind;
};

// library.py declares the same.
struct Rows {
    int64_t count;
    const int64_t *slots, *targets;  // whose states a row starts from, and where it leaves them; target -1: nowhere
    const int64_t *begins, *counts;  // its tokens
    const int64_t* by_blocks;  // 1: the recurrence takes many tokens at once
};

// library.py declares the same.
struct Tokens {
    int64_t count;
    Lines mixed, gate, rate, step;  // [channels], [value_heads * value_dim], [value_heads] each; rate: of the delta rule
    float* convolved;  // [count][channels]
    float* out;  // [count][value_heads * value_dim]; null: states alone
    Lines normed;  // the same, behind the norm
};

// Up to a vector of numbers; zeros behind them.
inline Floats load_some(const float* at, int count) {
    if (count >= LANES) return load<Floats>(at);
    Floats x{};
    memcpy(&x, at, count * sizeof(float));
    return x;
}

inline void store_some(float* at, int count, Floats x) {
    if (count >= LANES) store(at, x);
    else memcpy(at, &x, count * sizeof(float));
}

inline float number(const char* at, int kind, int64_t i) {
    if (kind == step::FLOAT32) return ((const float*)at)[i];
    uint16_t bits = ((const uint16_t*)at)[i];
    if (kind == step::BFLOAT16) return from_bf16(bits);
    uint16_t part[LANES] = {bits};
    return load_f16(part)[0];
}

inline void read_numbers(const char* at, int kind, int64_t count, float* to) {
    int64_t i = 0;
    if (kind == step::FLOAT32) {
        memcpy(to, at, count * sizeof(float));
        return;
    }
    for (; i + LANES <= count; i += LANES) store(to + i, step::load_number(at + i * 2, (Number)kind));
    for (; i < count; i++) to[i] = number(at, kind, i);
}

inline void write_numbers(char* at, int kind, int64_t count, const float* from) {
    if (kind == step::FLOAT32) {
        memcpy(at, from, count * sizeof(float));
        return;
    }
    uint16_t last[LANES];
    for (int64_t i = 0; i < count; i += LANES) {
        int size = count - i < LANES ? (int)(count - i) : LANES;
        Floats x = load_some(from + i, size);
        uint16_t* to = size == LANES ? (uint16_t*)at + i : last;
        if (kind == step::BFLOAT16) store_bf16(to, x);
        else store_f16(to, x);
        if (to == last) memcpy((uint16_t*)at + i, last, size * sizeof(uint16_t));
    }
}

inline const char* line(const Lines& lines, int64_t token) { return lines.at + token * lines.stride; }

inline int channels(const Layer& layer) {
    int keys = layer.key_heads * layer.key_dim;
    return 2 * keys + layer.value_heads * layer.value_dim;
}

constexpr int MAX_KERNEL = 8;
constexpr int BLOCK = 256;  // channels of a chunk

// [width][K - 1] numbers and K - 1 rows of them; a constant K is what lets the compiler use vectors.
template <int K> inline void split_tails(const float* tails, int width, int, float (*window)[BLOCK]) {
    for (int c = 0; c < width; c++)
        for (int j = 0; j < K - 1; j++) window[j][c] = tails[c * (K - 1) + j];
}

template <int K> inline void join_tails(float* tails, int width, int first, const float (*window)[BLOCK]) {
    const float* rows[K - 1 ? K - 1 : 1];
    for (int j = 0; j < K - 1; j++) rows[j] = window[(first + j) % K];
    for (int c = 0; c < width; c++)
        for (int j = 0; j < K - 1; j++) tails[c * (K - 1) + j] = rows[j][c];
}

template <int K> inline void convolve(const Layer& layer, const Rows& rows, const Tokens& tokens, int row, int block) {
    int all = channels(layer), first = block * BLOCK, width = all - first < BLOCK ? all - first : BLOCK;
    int64_t state = (int64_t)all * (K - 1), own = (int64_t)first * (K - 1), bytes = step::bytes_of((Number)layer.conv_kind);
    alignas(64) float window[K][BLOCK] = {}, weight[K][BLOCK] = {}, bias[BLOCK] = {}, out[BLOCK], tails[BLOCK * (K - 1) + 1];
    read_numbers(layer.conv_state + (rows.slots[row] * state + own) * bytes, layer.conv_kind, (int64_t)width * (K - 1), tails);
    split_tails<K>(tails, width, 0, window);
    for (int j = 0; j < K; j++) memcpy(weight[j], layer.conv_weight + (int64_t)j * all + first, width * sizeof(float));
    if (layer.conv_bias) memcpy(bias, layer.conv_bias + first, width * sizeof(float));
    int64_t begin = rows.begins[row], count = rows.counts[row];
    int64_t number_bytes = step::bytes_of((Number)tokens.mixed.kind);
    for (int64_t t = 0; t < count; t++) {
        float* newest = window[(t + K - 1) % K];
        read_numbers(line(tokens.mixed, begin + t) + first * number_bytes, tokens.mixed.kind, width, newest);
        const float* inputs[K];
        for (int j = 0; j < K; j++) inputs[j] = window[(t + j) % K];
        for (int c = 0; c < width; c += LANES) {
            Floats sum = load<Floats>(bias + c);
            for (int j = 0; j < K; j++) sum += load<Floats>(weight[j] + c) * load<Floats>(inputs[j] + c);
            store(out + c, layer.activates ? silu(sum) : sum);
        }
        memcpy(tokens.convolved + (begin + t) * all + first, out, width * sizeof(float));
    }
    if (rows.targets[row] < 0) return;
    join_tails<K>(tails, width, (int)(count % K), window);
    write_numbers(layer.conv_state + (rows.targets[row] * state + own) * bytes, layer.conv_kind, (int64_t)width * (K - 1), tails);
}

inline int conv_blocks(const Layer& layer) { return (channels(layer) + BLOCK - 1) / BLOCK; }

inline void convolve_chunk(const Layer& layer, const Rows& rows, const Tokens& tokens, int chunk) {
    int row = chunk / conv_blocks(layer), block = chunk % conv_blocks(layer);
    switch (layer.kernel) {
        case 2: return convolve<2>(layer, rows, tokens, row, block);
        case 3: return convolve<3>(layer, rows, tokens, row, block);
        case 4: return convolve<4>(layer, rows, tokens, row, block);
        case 5: return convolve<5>(layer, rows, tokens, row, block);
        case 6: return convolve<6>(layer, rows, tokens, row, block);
        case 7: return convolve<7>(layer, rows, tokens, row, block);
        case 8: return convolve<8>(layer, rows, tokens, row, block);
    }
}

// The gated norm of one token, in place, and then in its dtype.
inline void norm_token(const Layer& layer, const Tokens& tokens, int64_t token) {
    int width = layer.value_heads * layer.value_dim;
    float* out = tokens.out + token * width;
    const char* gates = line(tokens.gate, token);
    for (int first = 0; first < width; first += layer.norm_size) {
        float* group = out + first;
        const float* weight = layer.norm_weight ? layer.norm_weight + first % layer.norm_period : nullptr;
        alignas(64) float gate[BLOCK];
        Floats squares{};
        for (int at = 0; at < layer.norm_size; at += BLOCK) {
            int size = layer.norm_size - at < BLOCK ? layer.norm_size - at : BLOCK;
            if (layer.norm != BEFORE_GATE) {
                memset(gate, 0, sizeof gate);
                read_numbers(gates + (int64_t)(first + at) * step::bytes_of((Number)tokens.gate.kind), tokens.gate.kind, size, gate);
            }
            for (int i = 0; i < size; i += LANES) {
                Floats x = load_some(group + at + i, size - i);
                if (layer.norm != BEFORE_GATE) {
                    x = x * silu(load<Floats>(gate + i));
                    store_some(group + at + i, size - i, x);
                }
                squares += x * x;
            }
        }
        if (layer.norm == NO_NORM) continue;
        float scale = 1.0f / sqrtf(sum(squares) / layer.norm_size + layer.eps);
        for (int at = 0; at < layer.norm_size; at += BLOCK) {
            int size = layer.norm_size - at < BLOCK ? layer.norm_size - at : BLOCK;
            if (layer.norm == BEFORE_GATE) {
                memset(gate, 0, sizeof gate);
                read_numbers(gates + (int64_t)(first + at) * step::bytes_of((Number)tokens.gate.kind), tokens.gate.kind, size, gate);
            }
            for (int i = 0; i < size; i += LANES) {
                Floats x = load_some(group + at + i, size - i) * scale * load_some(weight + at + i, size - i);
                if (layer.norm == BEFORE_GATE) x = x * silu(load<Floats>(gate + i));
                store_some(group + at + i, size - i, x);
            }
        }
    }
    write_numbers(tokens.normed.at + token * tokens.normed.stride, tokens.normed.kind, width, out);
}

}  // namespace recurrent
