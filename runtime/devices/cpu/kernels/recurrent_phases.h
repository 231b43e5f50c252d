// Recurrent layers as phases of a program: between the products in front of them and the one behind.
//
//   Columns       columns of a product's rows, in the order and with the factors that the layer wants
//   Multiply      of a gated convolution alone (LFM 2): its inputs
//   Keep          what rows of drafts bring, until it is known how much of it is accepted
//   Convolve, Recur, NormTokens or GateConvolved: see recurrent.h and recurrent_heads.h
//
// Which rows a step has, and where their states are, is in step.states.
#pragma once

#include <vector>

#include "layers.h"
#include "recurrent_heads.h"

namespace recurrent {

using step::Buffer;
using step::Phase;
using step::Step;

// Numbers of each token in the rows of a buffer, from a column on. library.py declares the same.
struct Place {
    Buffer* buffer;  // null: there are none
    int64_t first;
};

inline Lines lines_of(const Place& place) {
    if (!place.buffer) return {nullptr, 0, step::FLOAT32};
    return {(char*)(place.buffer->numbers + place.first), (int64_t)step::padded(place.buffer->width) * 4, step::FLOAT32};
}

// Columns of a row that go to others, times a factor. library.py declares the same.
struct Run {
    int32_t start, to, count;
    float factor;
};

// Runs of columns from one buffer to another.
class Columns final : public Phase {
  public:
    Columns(Buffer* in, const Run* runs, int num_runs, Buffer* out) : in_(in), runs_(runs, runs + num_runs), out_(out) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step&, int chunk, int) override {
        const float* from = in_->row(chunk);
        float* to = out_->row(chunk);
        for (const Run& run : runs_)
            for (int i = 0; i < run.count; i++) to[run.to + i] = from[run.start + i] * run.factor;
    }

  private:
    Buffer* in_;
    const std::vector<Run> runs_;
    Buffer* out_;
};

// Products of numbers with numbers, or with the sigmoid of numbers.
class Multiply final : public Phase {
  public:
    Multiply(const Place& a, const Place& b, bool is_sigmoid, Buffer* out) : a_(a), b_(b), is_sigmoid_(is_sigmoid), out_(out) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step&, int chunk, int) override {
        const float *a = a_.buffer->row(chunk) + a_.first, *b = b_.buffer->row(chunk) + b_.first;
        float* to = out_->row(chunk);
        for (int i = 0; i < out_->width; i += LANES) {
            int left = out_->width - i;
            Floats other = load_some(b + i, left);
            if (is_sigmoid_) other = 1.0f / (1.0f + exponential(-other));
            store_some(to + i, left, load_some(a + i, left) * other);
        }
    }

  private:
    const Place a_, b_;
    const bool is_sigmoid_;
    Buffer* out_;
};

// What rows of drafts of a step bring to one layer. Python fills it; library.py declares the same.
struct Kept {
    int64_t count;
    const int64_t* tokens;  // [count]: places among the step's tokens
    float *mixed, *rate, *step;  // [count, width] each; null: the layer has none
};

// What the phases of a layer hand on. library.py declares the same.
struct Between {
    Place mixed, gate, rate, step;
    Buffer *convolved, *out, *normed;
};

// A layer in a program. The caller's `layer` and `kept` are read in every step, for their memory moves.
struct Mixer {
    const Layer* layer;
    const Kept* kept;
    Between rows;

    Tokens tokens(const Step& step) const {
        return {step.num_tokens, lines_of(rows.mixed), lines_of(rows.gate), lines_of(rows.rate), lines_of(rows.step),
                rows.convolved->numbers, rows.out ? rows.out->numbers : nullptr, lines_of({rows.normed, 0})};
    }
};

class Keep final : public Phase {
  public:
    explicit Keep(const Mixer& mixer) : m_(mixer) {}

    int begin(const Step&) override { return (int)m_.kept->count; }

    void compute(const Step&, int chunk, int) override {
        int heads = m_.layer->value_heads;
        copy(m_.rows.mixed, chunk, m_.kept->mixed, channels(*m_.layer));
        copy(m_.rows.rate, chunk, m_.kept->rate, heads);
        copy(m_.rows.step, chunk, m_.kept->step, heads);
    }

  private:
    void copy(const Place& from, int chunk, float* to, int width) const {
        if (to) memcpy(to + (int64_t)chunk * width, from.buffer->row(m_.kept->tokens[chunk]) + from.first, width * sizeof(float));
    }

    const Mixer m_;
};

class Convolve final : public Phase {
  public:
    explicit Convolve(const Mixer& mixer) : m_(mixer) {}

    int begin(const Step& step) override {
        tokens_ = m_.tokens(step);
        return (int)step.states->count * conv_blocks(*m_.layer);
    }

    void compute(const Step& step, int chunk, int) override { convolve_chunk(*m_.layer, *step.states, tokens_, chunk); }

  private:
    const Mixer m_;
    Tokens tokens_{};
};

class Recur final : public Phase {
  public:
    Recur(const Mixer& mixer, Scratches& scratches) : m_(mixer), scratches_(scratches) {}

    int begin(const Step& step) override {
        tokens_ = m_.tokens(step);
        return (int)step.states->count * m_.layer->value_heads;
    }

    void compute(const Step& step, int chunk, int thread) override {
        recur_chunk(*m_.layer, *step.states, tokens_, chunk, scratches_.of(thread));
    }

  private:
    const Mixer m_;
    Scratches& scratches_;
    Tokens tokens_{};
};

class NormTokens final : public Phase {
  public:
    explicit NormTokens(const Mixer& mixer) : m_(mixer) {}

    int begin(const Step& step) override {
        tokens_ = m_.tokens(step);
        return (int)step.num_tokens;
    }

    void compute(const Step&, int chunk, int) override { norm_token(*m_.layer, tokens_, chunk); }

  private:
    const Mixer m_;
    Tokens tokens_{};
};

// Behind a convolution alone: its outputs times a gate.
class GateConvolved final : public Phase {
  public:
    explicit GateConvolved(const Mixer& mixer) : m_(mixer) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step&, int chunk, int) override {
        int width = channels(*m_.layer);
        const float *from = m_.rows.convolved->numbers + (int64_t)chunk * width, *gate = m_.rows.gate.buffer->row(chunk) + m_.rows.gate.first;
        float* to = m_.rows.normed->row(chunk);
        for (int i = 0; i < width; i += LANES)
            store_some(to + i, width - i, load_some(from + i, width - i) * load_some(gate + i, width - i));
    }

  private:
    const Mixer m_;
};

}  // namespace recurrent
