// The first of the largest logits of a row without reading all of the head: a screen.
//
// A screen is a copy of the head in fewer bits, with two numbers for each output: how far its weights are from the
// head's, |w - r|, and how long they are, |w|. From the rough logit r . y of an output follow bounds of the head's, by
// the inequality of Cauchy and Schwarz, for x as the head takes it and y as the screen takes it:
//
//     |w . x - r . y|  <=  |w - r| |y|  +  |w| |x - y|  +  what float32 rounds in both sums
//
// One block of the head, the one with the best lower bound, says what a token has to reach. Then blocks of the head are
// computed in which some upper bound reaches that, by the product that computes them without a screen: so the largest
// logits have the same bits, equal ones among them. All other logits of the row are upper bounds below them.
#pragma once

#include <math.h>

#include <atomic>

#include "layers.h"
#include "logits.h"

namespace screen {

using namespace simd;
using step::Buffer;
using step::Phase;
using step::Step;
using weights::Matrix;
using weights::OUTPUTS;

constexpr int MOST_ROWS = 4;     // of a step with a screen: with more, products of the rough weights are no longer cheap
constexpr float SAFE = 1e29f;    // logits below it are finite, on the way to them too, and below sampling::FAR
constexpr float TINY = 1e-33f;   // more than is lost where products take subnormal numbers for zero
constexpr int FIRST_PAUSE = 16, LONGEST_PAUSE = 1024;  // steps without a screen behind one that was in vain

struct Screen {
    const Matrix* rough;   // null: there is none yet
    const float* errors;   // [outputs, padded to whole blocks], not below |w - r|; not finite: always computed
    const float* lengths;  // the same of |w|
    float longest;         // of them that are finite
};

// ---- making one

// Lengths as they are added up below: what float32 loses of squares, of subnormal ones too, is less.
inline float rounded_up(double length) { return (float)(length * (1 + 1e-5) + 1e-18); }

// Rounds 32 numbers to d * (code - 16) of ggml's Q5_0, packed at `to` for output `in_block`. -> the square of the distance
inline float round_group(const float* x, int in_block, char* to) {
    Floats most = load<Floats>(x), least = most;
    for (int i = LANES; i < ggml::GROUP; i += LANES) {
        most = max(most, load<Floats>(x + i));
        least = -max(-load<Floats>(x + i), -least);
    }
    float top = largest(most), bottom = largest(-least);
    uint16_t d[LANES];
    store_f16(d, broadcast((top > bottom ? top : -bottom) / -16));
    const Floats scale = broadcast(ggml::from_f16(d[0])), factor = broadcast(scale[0] == 0 ? 0 : 1 / scale[0]);
    int8_t codes[ggml::GROUP];
    Floats squares{};
    for (int i = 0; i < ggml::GROUP; i += LANES) {
        Floats number = load<Floats>(x + i), steps = number * factor;
        steps = steps > -16.0f ? steps : broadcast(-16.0f);  // not a number: what is rounded is measured
        Ints code = rounded(steps < 15.0f ? steps : broadcast(15.0f));
        Floats distance = number - scale * floats(code);
        squares += distance * distance;
        store_bytes(codes + i, code + 16);
    }
    ((uint16_t*)to)[in_block] = d[0];
    ggml::pack_codes<ggml::Q5_0>((const uint8_t*)codes, (uint32_t*)(to + ggml::Q5_0::HEAD_BYTES) + in_block);
    return sum(squares);
}

// A block of `rough`, which is Q5_0, and the numbers of its outputs. `row`: [inputs].
inline void make_block(const Matrix& head, const Matrix& rough, int block, float* row, float* errors, float* lengths) {
    char* to = const_cast<char*>(rough.data) + (size_t)block * weights::block_bytes(rough);
    memset(to, 0, weights::block_bytes(rough));
    for (int i = 0; i < OUTPUTS; i++) {
        int output = block * OUTPUTS + i;
        errors[output] = lengths[output] = 0;
        if (output >= head.outputs) continue;
        weights::unpack_row(head, output, row);
        double error = 0, length = 0;
        for (int k = 0; k < head.inputs; k += ggml::GROUP) {
            Floats squares{};
            for (int j = k; j < k + ggml::GROUP; j += LANES) squares += load<Floats>(row + j) * load<Floats>(row + j);
            length += sum(squares);
            error += round_group(row + k, i, to + k / ggml::GROUP * ggml::Q5_0::BLOCK_BYTES);
        }
        errors[output] = rounded_up(sqrt(error));
        lengths[output] = rounded_up(sqrt(length));
    }
}

// ---- a step

// Inputs of a product as the floats that they stand for: those of the head, or of the rough weights.
inline void read_row(const rows::Rows& rows, int row, float* out) {
    const char* at = rows::row_of(rows, row);
    for (int k = 0; k < rows.width; k++) {
        if (rows.form == rows::FLOAT32) out[k] = ((const float*)at)[k];
        else if (rows.form == rows::BFLOAT16) out[k] = from_bf16(((const uint16_t*)at)[k]);
        else out[k] = rows.scales[(size_t)row * (rows.width / rows::GROUP) + k / rows::GROUP] * (int8_t)at[k];
    }
}

// What the phases of a screen share.
struct Pass {
    Pass(const Matrix& head, Buffer* head_inputs, Buffer* rough_inputs)
        : head(head), head_inputs(head_inputs), rough_inputs(rough_inputs), num_blocks(weights::num_blocks(head)) {}

    // Between steps.
    void set(const Screen& made) {
        screen = made;
        double share = (double)weights::block_bytes(*screen.rough) / weights::block_bytes(head);
        most_blocks = (int)(num_blocks * (1 - share) / 2);
    }

    // Decides whether this step has a screen: not for some steps behind one of which too many blocks were left.
    void begin(const Step& step) {
        if (is_on) {
            bool was_vain = computed.load() > most_blocks;
            pause = was_vain ? next_pause : 0;
            next_pause = !was_vain ? FIRST_PAUSE : next_pause < LONGEST_PAUSE ? 2 * next_pause : LONGEST_PAUSE;
        }
        bool wanted = screen.rough && step.largest_only && step.num_samples > 0 && step.num_samples <= MOST_ROWS;
        is_on = wanted && pause == 0;
        if (wanted && pause > 0) pause--;
        num_rows = is_on ? (int)step.num_samples : 0;
        computed = 0;
    }

    float* logits_of(const Step& step, int row) const { return step.logits + step::padded(head.outputs) * row; }

    Screen screen{};
    const Matrix& head;
    Buffer *head_inputs, *rough_inputs;
    const int num_blocks;
    int most_blocks = 0;  // computed, up to which half of what a screen saves is left

    bool is_on = false;
    int num_rows = 0;  // 0: there is no screen in this step
    int pause = 0, next_pause = FIRST_PAUSE;
    // by row: what errors and lengths of outputs are multiplied with, and what a token has to reach
    float of_errors[MOST_ROWS], of_lengths[MOST_ROWS], limits[MOST_ROWS];
    std::atomic<int> computed{0};  // blocks of the head
};

// Rows as the screen takes them, and how far they are from those that the head takes. The first phase of a screen.
class Approach final : public Phase {
  public:
    explicit Approach(Pass* pass) : pass_(pass) {}

    int begin(const Step& step) override {
        pass_->begin(step);
        return pass_->num_rows;
    }

    void compute(const Step&, int row, int) override {
        const int inputs = pass_->head.inputs, width = pass_->head_inputs->prepared.width;
        float x[MAX_WIDTH] __attribute__((aligned(64))), y[MAX_WIDTH];
        read_row(pass_->head_inputs->prepared, row, x);
        memset(x + inputs, 0, (width - inputs) * sizeof(float));
        rows::prepare_row(x, pass_->rough_inputs->prepared, row);
        read_row(pass_->rough_inputs->prepared, row, y);
        double between = 0, of_x = 0, of_y = 0;
        for (int k = 0; k < inputs; k++) {
            double from = (double)x[k] - y[k];
            between += from * from;
            of_x += (double)x[k] * x[k];
            of_y += (double)y[k] * y[k];
        }
        of_x = sqrt(of_x), of_y = sqrt(of_y);
        // each product and each sum rounds by 2^-24 of something that |w| |x| or |r| |y| bounds
        double rounding = (inputs + 64) * 0x1p-23;
        pass_->of_errors[row] = rounded_up(of_y * (1 + rounding));
        pass_->of_lengths[row] = rounded_up(sqrt(between) + rounding * (of_x + of_y));
        is_safe_[row] = of_x * pass_->screen.longest < SAFE;  // false: numbers that are none, too
    }

    bool is_safe(int row) const { return is_safe_[row]; }

    static constexpr int MAX_WIDTH = layers::Prepare::MAX_WIDTH;

  private:
    Pass* pass_;
    bool is_safe_[MOST_ROWS];
};

// Upper bounds of all logits, in their places, and the block with the best lower bound.
class Bounds final : public Phase {
  public:
    Bounds(Pass* pass, int num_threads) : pass_(pass), num_threads_(num_threads) {}

    int begin(const Step&) override {
        if (!pass_->num_rows) return 0;
        blocks_ = layers::blocks_of_chunk(weights::block_bytes(*pass_->screen.rough), pass_->num_blocks, num_threads_);
        num_chunks_ = (pass_->num_blocks + blocks_ - 1) / blocks_;
        best_.resize((size_t)num_chunks_ * MOST_ROWS);
        return num_chunks_;
    }

    void compute(const Step& step, int chunk, int) override {
        const Screen& screen = pass_->screen;
        Best* best = &best_[(size_t)chunk * MOST_ROWS];
        for (int row = 0; row < pass_->num_rows; row++) best[row] = {-INFINITY, 0};
        int end = (chunk + 1) * blocks_ < pass_->num_blocks ? (chunk + 1) * blocks_ : pass_->num_blocks;
        for (int block = chunk * blocks_; block < end; block++)
            product::multiply(*screen.rough, pass_->rough_inputs->prepared, 0, pass_->num_rows, block, [&](int row, const Floats* sums) {
                Floats most = broadcast(-INFINITY);
                for (int v = 0; v < VECTORS; v++) {
                    int output = block * OUTPUTS + v * LANES;
                    Floats margin = load<Floats>(screen.errors + output) * pass_->of_errors[row] +
                                    load<Floats>(screen.lengths + output) * pass_->of_lengths[row];
                    margin = (margin + absolute(sums[v]) * 0x1p-20f) * (1 + 0x1p-20f) + TINY;
                    Floats upper = sums[v] + margin, lower = sums[v] - margin;
                    for (int i = pass_->head.outputs - output; i < LANES; i++)  // behind the last output
                        if (i >= 0) upper[i] = lower[i] = -INFINITY;
                    store(pass_->logits_of(step, row) + output, upper);
                    most = max(lower, most);
                }
                float value = largest(most);
                if (value > best[row].value) best[row] = {value, block};
            });
    }

    int best_block(int row) const {
        Best best{-INFINITY, 0};
        for (int chunk = 0; chunk < num_chunks_; chunk++) {
            const Best& other = best_[(size_t)chunk * MOST_ROWS + row];
            if (other.value > best.value) best = other;
        }
        return best.block;
    }

  private:
    struct Best {
        float value;
        int block;
    };

    Pass* pass_;
    const int num_threads_;
    int blocks_ = 1, num_chunks_ = 0;
    std::vector<Best> best_;  // [chunks, MOST_ROWS]
};

// What a token has to reach: the largest logit of a row's best block.
class Limits final : public Phase {
  public:
    Limits(Pass* pass, const Approach* approach, const Bounds* bounds) : pass_(pass), approach_(approach), bounds_(bounds) {}

    int begin(const Step&) override { return pass_->num_rows; }

    void compute(const Step&, int row, int) override {
        float limit = -INFINITY;
        int block = bounds_->best_block(row), left = pass_->head.outputs - block * OUTPUTS;
        if (approach_->is_safe(row))
            product::multiply(pass_->head, pass_->head_inputs->prepared, row, row + 1, block, [&](int, const Floats* sums) {
                for (int i = 0; i < OUTPUTS && i < left; i++) {
                    float logit = sampling::clean(sums[i / LANES])[i % LANES];
                    if (logit > limit) limit = logit;
                }
            });
        pass_->limits[row] = limit;
    }

  private:
    Pass* pass_;
    const Approach* approach_;
    const Bounds* bounds_;
};

// Logits of the blocks that are left; all of them in a step without a screen.
class Head final : public Phase {
  public:
    Head(Pass* pass, int num_threads) : pass_(pass), plain_(&pass->head, pass->head_inputs, num_threads) {}

    int begin(const Step& step) override {
        int chunks = plain_.begin(step);
        return pass_->num_rows ? (pass_->num_blocks + BLOCKS - 1) / BLOCKS : chunks;
    }

    void compute(const Step& step, int chunk, int thread) override {
        if (!pass_->num_rows) return plain_.compute(step, chunk, thread);
        int end = (chunk + 1) * BLOCKS < pass_->num_blocks ? (chunk + 1) * BLOCKS : pass_->num_blocks, computed = 0;
        for (int block = chunk * BLOCKS; block < end; block++) {
            if (!is_left(step, block)) continue;
            plain_.block(pass_->num_rows, block);
            computed++;
        }
        if (computed) pass_->computed.fetch_add(computed);
    }

  private:
    static constexpr int BLOCKS = 64;  // of a chunk

    bool is_left(const Step& step, int block) const {
        for (int row = 0; row < pass_->num_rows; row++)
            for (int v = 0; v < VECTORS; v++) {
                Floats upper = load<Floats>(pass_->logits_of(step, row) + block * OUTPUTS + v * LANES);
                if (any(~(upper < pass_->limits[row]))) return true;
            }
        return false;
    }

    Pass* pass_;
    layers::Head plain_;
};

}  // namespace screen
