// Phases of a decoder layer other than attention: embedding, norms, products, and what happens to queries and keys.
#pragma once

#include <math.h>

#include <vector>

#include "cache.h"
#include "functions.h"
#include "product.h"
#include "step.h"

namespace layers {

using namespace simd;
using step::Buffer;
using step::Number;
using step::Phase;
using step::Step;

// Rows of a table [vocabulary, width], or of packed weights that the head shares, times `scale`.
class Embedding final : public Phase {
  public:
    Embedding(const weights::Matrix* packed, const char* table, Number kind, float scale, Buffer* out)
        : packed_(packed), table_(table), kind_(kind), scale_(scale), out_(out) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step& step, int chunk, int) override {
        float* to = out_->row(chunk);
        int64_t id = step.token_ids[chunk];
        if (packed_) weights::unpack_row(*packed_, (int)id, to);
        const char* from = table_ + (size_t)id * out_->width * step::bytes_of(kind_);
        for (int i = 0; i < out_->width; i += LANES) {
            Floats x = packed_ ? load<Floats>(to + i) : load_tail(from, i);
            store_tail(to, i, x * scale_);
        }
    }

  private:
    Floats load_tail(const char* from, int at) const {
        int bytes = step::bytes_of(kind_), left = out_->width - at;
        if (left >= LANES) return step::load_number(from + (size_t)at * bytes, kind_);
        char part[LANES * 4] = {};
        memcpy(part, from + (size_t)at * bytes, (size_t)left * bytes);
        return step::load_number(part, kind_);
    }

    void store_tail(float* to, int at, Floats x) const {
        int left = out_->width - at;
        memcpy(to + at, &x, (left < LANES ? left : LANES) * sizeof(float));
    }

    const weights::Matrix* packed_;
    const char* table_;
    Number kind_;
    float scale_;
    Buffer* out_;
};

// Embeddings that requests bring in place of those of their tokens.
class Replace final : public Phase {
  public:
    explicit Replace(Buffer* out) : out_(out) {}
    int begin(const Step& step) override { return (int)step.num_embeds; }
    void compute(const Step& step, int chunk, int) override {
        memcpy(out_->row(step.embed_places[chunk]), step.embeds + (size_t)chunk * out_->width, out_->width * sizeof(float));
    }

  private:
    Buffer* out_;
};

// Copies the step's input to a buffer.
class Input final : public Phase {
  public:
    explicit Input(Buffer* out) : out_(out) {}
    int begin(const Step& step) override { return (int)step.num_tokens; }
    void compute(const Step& step, int chunk, int) override {
        float* to = out_->row(chunk);
        memcpy(to, step.input + (size_t)chunk * out_->width, out_->width * sizeof(float));
        memset(to + out_->width, 0, (step::padded(out_->width) - out_->width) * sizeof(float));
    }

  private:
    Buffer* out_;
};

// Copies a buffer to the step's output.
class Output final : public Phase {
  public:
    explicit Output(Buffer* in) : in_(in) {}
    int begin(const Step& step) override { return (int)step.num_tokens; }
    void compute(const Step& step, int chunk, int) override {
        memcpy(step.output + (size_t)chunk * in_->width, in_->row(chunk), in_->width * sizeof(float));
    }

  private:
    Buffer* in_;
};

// x / sqrt(mean(x^2) + eps) * weight for `width` numbers, in place allowed. Both have zeros up to a multiple of 64.
inline void rms_norm(const float* x, const float* weight, float eps, int width, float* out) {
    Floats squares{};
    for (int i = 0; i < width; i += LANES) {
        Floats part = load<Floats>(x + i);
        squares += part * part;
    }
    float scale = 1.0f / sqrtf(sum(squares) / width + eps);
    for (int i = 0; i < width; i += LANES) store(out + i, load<Floats>(x + i) * scale * load<Floats>(weight + i));
}

// Rows in the form that the next product wants, behind a norm if there is one (Zhang and Sennrich, 2019). A norm may
// also end in floats: then they are stored, or added to those of another buffer.
class Prepare final : public Phase {
  public:
    enum Then { PREPARE = 0, STORE = 1, ADD = 2 };

    Prepare(Buffer* in, const float* norm, float eps, Buffer* out, Then then)
        : in_(in), norm_(norm), eps_(eps), out_(out), then_(then) {}

    int begin(const Step& step) override { return (int)step.num_tokens * in_->heads; }

    void compute(const Step&, int chunk, int) override { row(chunk, chunk); }

    // From row `from` to row `to_row`.
    void row(int from, int to_row) const {
        const float* x = in_->row(from);
        int wide = (int)step::padded(in_->width);
        float normed[MAX_WIDTH] __attribute__((aligned(64)));
        if (norm_) {
            memset(normed + wide - 64, 0, 64 * sizeof(float));
            rms_norm(x, norm_, eps_, in_->width, normed);
            x = normed;
        }
        if (then_ == PREPARE) return rows::prepare_row(x, out_->prepared, to_row);
        float* to = out_->row(to_row);
        for (int i = 0; i < wide; i += LANES)
            store(to + i, then_ == ADD ? load<Floats>(to + i) + load<Floats>(x + i) : load<Floats>(x + i));
    }

    static constexpr int MAX_WIDTH = 16384;  // of a row that is normed

  private:
    Buffer* in_;
    const float* norm_;
    float eps_;
    Buffer* out_;
    Then then_;
};

// Rows behind which logits are wanted, behind the last norm and in the form that the head wants.
class PrepareSamples final : public Phase {
  public:
    PrepareSamples(Buffer* in, const float* norm, float eps, Buffer* out) : prepare_(in, norm, eps, out, Prepare::PREPARE) {}
    int begin(const Step& step) override { return (int)step.num_samples; }
    void compute(const Step& step, int chunk, int) override { prepare_.row((int)step.sample_places[chunk], chunk); }

  private:
    Prepare prepare_;
};

constexpr size_t CHUNK_BYTES = 48 << 10, MOST_BYTES = 256 << 10;
constexpr int CHUNKS_OF_THREAD = 8;

// Blocks of weights that a chunk reads, where `work` blocks of `bytes` each are read in all: CHUNKS_OF_THREAD chunks for
// each thread, of CHUNK_BYTES to MOST_BYTES. A stream of weights begins slowly, because nothing has fetched its first lines
// ahead.
inline int blocks_of_chunk(size_t bytes, int64_t work, int num_threads) {
    size_t wanted = bytes * work / (CHUNKS_OF_THREAD * num_threads);
    wanted = wanted < CHUNK_BYTES ? CHUNK_BYTES : wanted > MOST_BYTES ? MOST_BYTES : wanted;
    return bytes >= wanted ? 1 : (int)(wanted / bytes);
}

// out = scale * (in W^T + bias), or added to out, or act(scale * gate) * up of the two halves of W's outputs.
class Linear final : public Phase {
  public:
    enum Then { STORE = 0, ADD = 1, SILU_AND_MUL = 2, GELU_AND_MUL = 3 };

    Linear(const weights::Matrix* weight, const float* bias, Buffer* in, Buffer* out, Then then, int num_threads, float scale = 1)
        : w_(*weight), bias_(bias), in_(in), out_(out), then_(then), num_threads_(num_threads), scale_(scale),
          num_blocks_(weights::num_blocks(w_) / (is_gated() ? 2 : 1)) {}

    // Chunks of blocks_of_chunk; those of ROW_PANEL rows where there are many; one chunk where the whole is less work than
    // it takes to meet.
    int begin(const Step& step) override { return begin(step.num_tokens); }

    int begin(int64_t num_rows) {
        num_rows_ = (int)num_rows;
        size_t bytes = weights::block_bytes(w_) * (is_gated() ? 2 : 1);
        blocks_per_chunk_ = blocks_of_chunk(bytes, num_blocks_, num_threads_);
        if (bytes * num_blocks_ * ((num_rows + 7) / 8) <= ALONE_BYTES) blocks_per_chunk_ = num_blocks_;
        num_panels_ = (int)((num_rows + ROW_PANEL - 1) / ROW_PANEL);
        return (num_blocks_ + blocks_per_chunk_ - 1) / blocks_per_chunk_ * num_panels_;
    }

    void compute(const Step&, int chunk, int) override {
        int first = chunk / num_panels_ * blocks_per_chunk_, row = chunk % num_panels_ * ROW_PANEL;
        int last = first + blocks_per_chunk_ < num_blocks_ ? first + blocks_per_chunk_ : num_blocks_;
        int end = row + ROW_PANEL < num_rows_ ? row + ROW_PANEL : num_rows_;
        for (int block = first; block < last; block++) is_gated() ? gated(row, end, block) : plain(row, end, block);
    }

    // One block without gates. Rows of buffers are padded to a multiple of 64 outputs, so whole blocks are stored.
    void plain(int row, int end, int block) {
        product::multiply(w_, in_->prepared, row, end, block, [&](int m, const Floats* sums) {
            for (int v = 0; v < VECTORS; v++) {
                int output = block * weights::OUTPUTS + v * LANES;
                float* to = out_->row(m) + output;
                Floats value = (sums[v] + bias_at(output)) * scale_;
                store(to, then_ == ADD ? load<Floats>(to) + value : value);
            }
        });
    }

    static constexpr size_t ALONE_BYTES = 192 << 10;  // 8 to 20 us of one thread
    static constexpr int ROW_PANEL = product::ROW_PANEL;

  private:
    bool is_gated() const { return then_ >= SILU_AND_MUL; }

    Floats bias_at(int output) const { return bias_ ? load<Floats>(bias_ + output) : Floats{}; }

    void gated(int row, int end, int block) {
        for (int stop; row < end; row = stop) {
            stop = row + product::next_rows(end - row, product::rows_of_pair(w_));
            Floats gates[product::MOST_ROWS_OF_PAIR][VECTORS];
            product::multiply(w_, in_->prepared, row, stop, block, [&](int m, const Floats* sums) {
                for (int v = 0; v < VECTORS; v++)
                    gates[m - row][v] = (sums[v] + bias_at(block * weights::OUTPUTS + v * LANES)) * scale_;
            });
            product::multiply(w_, in_->prepared, row, stop, block + num_blocks_, [&](int m, const Floats* sums) {
                for (int v = 0; v < VECTORS; v++) {
                    int output = block * weights::OUTPUTS + v * LANES;
                    Floats gate = gates[m - row][v], up = sums[v] + bias_at(output + num_blocks_ * weights::OUTPUTS);
                    store(out_->row(m) + output, (then_ == SILU_AND_MUL ? silu(gate) : gelu_tanh(gate)) * up);
                }
            });
        }
    }

    const weights::Matrix w_;
    const float* bias_;
    Buffer* in_;
    Buffer* out_;
    const Then then_;
    const int num_threads_;
    const float scale_;
    const int num_blocks_;
    int num_rows_ = 0, blocks_per_chunk_ = 1, num_panels_ = 1;
};

// Logits of the step's samples, where the caller wants them.
class Head final : public Phase {
  public:
    Head(const weights::Matrix* weight, Buffer* in, int num_threads)
        : logits_((int)step::padded(weight->outputs), -1), linear_(weight, nullptr, in, &logits_, Linear::STORE, num_threads) {}

    int begin(const Step& step) override {
        logits_.lend(step.logits);
        return linear_.begin(step.num_samples);
    }

    void compute(const Step& step, int chunk, int thread) override { linear_.compute(step, chunk, thread); }

    // One block of the outputs of the first rows.
    void block(int num_rows, int block) { linear_.plain(0, num_rows, block); }

  private:
    Buffer logits_;
    Linear linear_;
};

// act(scale * gate) * up of rows [gate, up], for widths of which a half is not a whole number of blocks.
class ActAndMul final : public Phase {
  public:
    ActAndMul(Buffer* in, Buffer* out, Linear::Then act, float scale) : in_(in), out_(out), act_(act), scale_(scale) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step&, int chunk, int) override {
        const float* gates = in_->row(chunk);
        float* to = out_->row(chunk);
        for (int i = 0, left = out_->width; left > 0; i += LANES, left -= LANES) {
            Floats gate{}, up{};
            size_t bytes = (left < LANES ? left : LANES) * sizeof(float);
            memcpy(&gate, gates + i, bytes);
            gate *= scale_;
            memcpy(&up, gates + out_->width + i, bytes);
            Floats value = (act_ == Linear::SILU_AND_MUL ? silu(gate) : gelu_tanh(gate)) * up;
            memcpy(to + i, &value, bytes);
        }
    }

  private:
    Buffer* in_;
    Buffer* out_;
    Linear::Then act_;
    const float scale_;
};

// Cosines and sines of positions, float32 [positions, dim / 2] each. Python grows them.
struct RotaryTables {
    const float* cos;
    const float* sin;
};

// What a layer's attention is made of.
struct Heads {
    int num_heads, num_kv_heads, dim;
    const float* q_norm;  // [dim], null: none
    const float* k_norm;
    float eps;
    const RotaryTables* rotary;
    char* k_cache;  // [locations, kv heads, dim]
    char* v_cache;
    Number kind;  // of the caches
    int pool;
    float scale, cap;  // scores become cap * tanh(scale * product / cap); 0: no cap
    int window;        // 0: all tokens before
    const float* sinks;  // [heads], null: none
    const float* slopes;  // [heads]: a score loses this times the key's distance from the query; null: nothing
    float k_scale, v_scale;  // what is in the caches is times them
};

// Turns pairs of numbers (Su et al., 2021): the first half of x is paired with the second.
inline void rotate(float* x, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats a = load<Floats>(x + i), b = load<Floats>(x + half + i), c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

// Norms and turns queries and keys of a row of [queries, keys, values] in place; keys and values go to the cache.
class PrepareHeads final : public Phase {
  public:
    PrepareHeads(Buffer* qkv, const Heads& heads) : qkv_(qkv), h_(heads) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step& step, int chunk, int) override {
        int64_t position = step.positions[chunk], location = step.locations[h_.pool][chunk];
        const float* cos = h_.rotary->cos + position * (h_.dim / 2);
        const float* sin = h_.rotary->sin + position * (h_.dim / 2);
        cache::Cache keys{h_.k_cache, h_.num_kv_heads, h_.dim}, values{h_.v_cache, h_.num_kv_heads, h_.dim};
        float* head = qkv_->row(chunk);
        for (int i = 0; i < h_.num_heads + h_.num_kv_heads; i++, head += h_.dim) {
            const float* norm = i < h_.num_heads ? h_.q_norm : h_.k_norm;
            if (norm) norm_head(head, norm);
            rotate(head, cos, sin, h_.dim / 2);
            if (i >= h_.num_heads) cache::write(keys, h_.kind, location, i - h_.num_heads, head, 1 / h_.k_scale);
        }
        for (int i = 0; i < h_.num_kv_heads; i++, head += h_.dim)
            cache::write(values, h_.kind, location, i, head, 1 / h_.v_scale);
    }

  private:
    void norm_head(float* head, const float* norm) const {
        if (h_.dim % LANES == 0) return rms_norm(head, norm, h_.eps, h_.dim, head);
        float padded[cache::MAX_DIM] = {};
        memcpy(padded, head, h_.dim * sizeof(float));
        rms_norm(padded, norm, h_.eps, h_.dim, padded);
        memcpy(head, padded, h_.dim * sizeof(float));
    }

    Buffer* qkv_;
    const Heads h_;
};

}  // namespace layers
