// Experts (MoE): every token passes the few experts that its router chooses, and all that one expert does for the
// tokens of a step is computed together.
//
//   Route    scores of the router -> experts of a token and their weights
//   Sort     rows for all pairs of token and expert, expert after expert
//   Spread   each token, in the form of inputs, to its rows
//   GateUp   act(gate) * up of the rows, each by its expert
//   Refit    these as inputs of the last product
//   Down     the products, times their weights, added to their tokens in the order of the experts
//
// A row of a product has the same bits in any company, and a token's sum has an order of its own, so a token's result
// does not depend on the others.
#pragma once

#include <vector>

#include "layers.h"

namespace experts {

using namespace simd;
using layers::Linear;
using step::Buffer;
using step::Phase;
using step::Step;
using weights::Matrix;

constexpr int MAX_EXPERTS = 1024;
constexpr int MAX_GROUPS = 64;

// How scores become experts and weights: Experts.route of devices/base.py says it. Python fills it.
struct Routing {
    int top_k;
    int is_sigmoid;  // else softmax
    int num_groups, top_groups, best_of_group;  // a group's rank is the sum of its best scores, one or two
    int normalizes;
    float scale;
};

enum Act { SILU = 0, GELU = 1, CLAMPED = 2 };

// The experts of one layer that are on this rank, all of one shape. Halves of gate_up are whole blocks.
struct Weights {
    Act act;
    std::vector<const Matrix*> gate_up, down;  // the caller's
    const float* gate_up_bias;  // [experts, outputs of gate_up], null: none
    const float* down_bias;     // [experts, outputs of down in whole blocks], null: none

    int count() const { return (int)gate_up.size(); }
};

// Where the tokens of a layer are added up by expert: int32 [experts], null: nowhere.
struct Counter {
    int32_t* counts;
};

// The pairs of token and expert of a step, in the order of the tokens and in rows sorted by expert.
class Assignment {
  public:
    Assignment(int num_experts, int top_k) : num_experts(num_experts), top_k(top_k) {}
    ~Assignment() { free(memory_); }
    Assignment(const Assignment&) = delete;

    const int num_experts, top_k;
    int32_t* ids = nullptr;     // [tokens, top_k]; outside 0 .. num_experts - 1: experts of other ranks
    float* weights = nullptr;   // [tokens, top_k]
    int32_t* rows = nullptr;    // [tokens, top_k]: the row of a pair, -1: another rank's
    int32_t* pairs = nullptr;   // [rows]: the pair of a row
    int32_t* starts = nullptr;  // [num_experts + 1]: first row of each expert
    int32_t* panels = nullptr;  // [num_experts + 1]: first panel of rows of each expert

    // False: there is no memory.
    bool reserve(int64_t num_tokens) {
        if (num_tokens <= capacity_) return true;
        free(memory_);
        size_t count = step::padded(num_tokens * top_k), table = step::padded(num_experts + 1);
        memory_ = (char*)step::allocate((4 * count + 2 * table) * sizeof(int32_t));
        capacity_ = memory_ ? num_tokens : 0;
        if (!memory_) return false;
        ids = (int32_t*)memory_;
        weights = (float*)(ids + count);
        rows = (int32_t*)(weights + count);
        pairs = rows + count;
        starts = pairs + count;
        panels = starts + table;
        return true;
    }

  private:
    char* memory_ = nullptr;
    int64_t capacity_ = 0;
};

class Route final : public Phase {
  public:
    Route(Buffer* logits, const Routing& routing, const float* bias, Assignment* out)
        : logits_(logits), r_(routing), bias_(bias), out_(out) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step&, int chunk, int) override {
        int count = out_->num_experts;
        float* scores = logits_->row(chunk);
        r_.is_sigmoid ? sigmoid(scores, count) : softmax(scores, count);
        float ranks[MAX_EXPERTS];
        for (int i = 0; i < count; i++) ranks[i] = bias_ ? scores[i] + bias_[i] : scores[i];
        if (r_.num_groups > r_.top_groups) keep_best_groups(ranks, count);
        int32_t* ids = out_->ids + (size_t)chunk * r_.top_k;
        float* weights = out_->weights + (size_t)chunk * r_.top_k;
        float total = 0;
        for (int k = 0; k < r_.top_k; k++) {
            ids[k] = take_best(ranks, count);
            weights[k] = scores[ids[k]];
            total += weights[k];
        }
        for (int k = 0; k < r_.top_k; k++)
            weights[k] = (r_.normalizes ? weights[k] / (total + 1e-20f) : weights[k]) * r_.scale;
    }

  private:
    // Rows of buffers are padded to whole vectors; `scores` beyond the last expert are not used.
    static void sigmoid(float* scores, int count) {
        for (int i = 0; i < count; i += LANES)
            store(scores + i, 1.0f / (1.0f + exponential(-load<Floats>(scores + i))));
    }

    static void softmax(float* scores, int count) {
        float most = scores[0], total = 0;
        for (int i = 1; i < count; i++) most = scores[i] > most ? scores[i] : most;
        for (int i = 0; i < count; i += LANES)
            store(scores + i, exponential(load<Floats>(scores + i) - broadcast(most)));
        for (int i = 0; i < count; i++) total += scores[i];
        for (int i = 0; i < count; i++) scores[i] /= total;
    }

    // The first of the largest; it is not found again.
    static int take_best(float* ranks, int count) {
        int best = 0;
        for (int i = 1; i < count; i++) best = ranks[i] > ranks[best] ? i : best;
        ranks[best] = -INFINITY;
        return best;
    }

    void keep_best_groups(float* ranks, int count) const {
        float sums[MAX_GROUPS];
        bool keeps[MAX_GROUPS] = {};
        int size = count / r_.num_groups;
        for (int group = 0; group < r_.num_groups; group++) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = group * size; i < (group + 1) * size; i++) {
                if (ranks[i] > first) second = first, first = ranks[i];
                else if (ranks[i] > second) second = ranks[i];
            }
            sums[group] = r_.best_of_group == 2 ? first + second : first;
        }
        for (int i = 0; i < r_.top_groups; i++) keeps[take_best(sums, r_.num_groups)] = true;
        for (int i = 0; i < count; i++)
            if (!keeps[i / size]) ranks[i] = -INFINITY;
    }

    Buffer* logits_;
    const Routing r_;
    const float* bias_;
    Assignment* out_;
};

constexpr int PANEL = 120;  // rows of an expert that a chunk computes at once: a multiple of all tiles' rows

// The first panels of experts are counted here as well, so that a chunk finds its expert.
class Sort final : public Phase {
  public:
    Sort(Assignment* pairs, const Counter* counter) : a_(*pairs), counter_(counter) {}

    int begin(const Step&) override { return 1; }

    void compute(const Step& step, int, int) override {
        int num_pairs = (int)step.num_tokens * a_.top_k, *starts = a_.starts;
        memset(starts, 0, (a_.num_experts + 1) * sizeof(int32_t));
        for (int i = 0; i < num_pairs; i++)
            if (is_here(a_.ids[i])) starts[a_.ids[i] + 1]++;
        a_.panels[0] = 0;
        for (int e = 0; e < a_.num_experts; e++) {
            if (counter_ && counter_->counts) counter_->counts[e] += starts[e + 1];
            a_.panels[e + 1] = a_.panels[e] + (starts[e + 1] + PANEL - 1) / PANEL;
            starts[e + 1] += starts[e];
        }
        // Each start moves to the end of its expert, which is where the next one starts.
        for (int i = 0; i < num_pairs; i++) {
            a_.rows[i] = is_here(a_.ids[i]) ? starts[a_.ids[i]]++ : -1;
            if (a_.rows[i] >= 0) a_.pairs[a_.rows[i]] = i;
        }
        for (int e = a_.num_experts; e > 0; e--) starts[e] = starts[e - 1];
        starts[0] = 0;
    }

  private:
    bool is_here(int id) const { return id >= 0 && id < a_.num_experts; }

    Assignment& a_;
    const Counter* counter_;
};

class Spread final : public Phase {
  public:
    Spread(const Assignment* pairs, Buffer* in, Buffer* out) : a_(*pairs), in_(in), out_(out) {}

    int begin(const Step& step) override { return (int)step.num_tokens * a_.top_k; }

    void compute(const Step&, int chunk, int) override {
        if (a_.rows[chunk] >= 0) rows::prepare_row(in_->row(chunk / a_.top_k), out_->prepared, a_.rows[chunk]);
    }

  private:
    const Assignment& a_;
    Buffer* in_;
    Buffer* out_;
};

// The weights of the next product: from there on each product fetches its own.
inline void prefetch_begin(const Matrix& w, int block) {
    const char* data = w.data + (size_t)block * weights::block_bytes(w);
    for (int i = 0; i < product::PREFETCH; i += 64) __builtin_prefetch(data + i, 0, 3);
}

// A chunk is some blocks of one expert and a panel of its rows; panels of the same blocks follow each other.
class GateUp final : public Phase {
  public:
    GateUp(const Weights* weights, const Assignment* pairs, Buffer* in, Buffer* out, int num_threads)
        : w_(*weights), a_(*pairs), in_(in), out_(out), num_threads_(num_threads),
          num_blocks_(weights::num_blocks(*w_.gate_up[0]) / 2) {}

    // As many as any choice of experts may make; the weights of a chunk are those of one.
    int begin(const Step& step) override {
        int64_t num_pairs = step.num_tokens * a_.top_k;
        int64_t chosen = num_pairs < a_.num_experts ? num_pairs : a_.num_experts;
        blocks_per_chunk_ = layers::blocks_of_chunk(2 * weights::block_bytes(*w_.gate_up[0]), chosen * num_blocks_, num_threads_);
        if (blocks_per_chunk_ > num_blocks_) blocks_per_chunk_ = num_blocks_;
        chunks_per_panel_ = (num_blocks_ + blocks_per_chunk_ - 1) / blocks_per_chunk_;
        return (int)((chosen + num_pairs / PANEL) * chunks_per_panel_);
    }

    void compute(const Step&, int chunk, int) override {
        int expert = expert_of(chunk / chunks_per_panel_);
        if (expert < 0) return;
        int panels = a_.panels[expert + 1] - a_.panels[expert];
        int local = chunk - a_.panels[expert] * chunks_per_panel_;
        int block = local / panels * blocks_per_chunk_, row = a_.starts[expert] + local % panels * PANEL;
        int last = block + blocks_per_chunk_ < num_blocks_ ? block + blocks_per_chunk_ : num_blocks_;
        int end = row + PANEL < a_.starts[expert + 1] ? row + PANEL : a_.starts[expert + 1];
        for (; block < last; block++) multiply(expert, row, end, block);
    }

  private:
    int expert_of(int panel) const {
        if (panel >= a_.panels[a_.num_experts]) return -1;
        int low = 0, high = a_.num_experts;  // the last expert whose first panel is not behind this one
        while (high - low > 1) {
            int middle = (low + high) / 2;
            (a_.panels[middle] <= panel ? low : high) = middle;
        }
        return low;
    }

    void multiply(int expert, int row, int end, int block) const {
        const Matrix& w = *w_.gate_up[expert];
        const float* bias = w_.gate_up_bias ? w_.gate_up_bias + (size_t)expert * w.outputs : nullptr;
        auto bias_at = [&](int output) { return bias ? load<Floats>(bias + output) : Floats{}; };
        int up_block = block + num_blocks_;
        for (int stop; row < end; row = stop) {
            stop = row + product::next_rows(end - row, product::rows_of_tile(w));
            Floats gates[simd::ROWS][VECTORS];
            prefetch_begin(w, up_block);
            product::multiply(w, in_->prepared, row, stop, block, [&](int m, const Floats* sums) {
                for (int v = 0; v < VECTORS; v++)
                    gates[m - row][v] = sums[v] + bias_at(block * weights::OUTPUTS + v * LANES);
            });
            product::multiply(w, in_->prepared, row, stop, up_block, [&](int m, const Floats* sums) {
                for (int v = 0; v < VECTORS; v++) {
                    Floats up = sums[v] + bias_at(up_block * weights::OUTPUTS + v * LANES);
                    store(out_->row(m) + block * weights::OUTPUTS + v * LANES, act(gates[m - row][v], up));
                }
            });
        }
    }

    Floats act(Floats gate, Floats up) const {
        if (w_.act == SILU) return silu(gate) * up;
        if (w_.act == GELU) return gelu_tanh(gate) * up;
        constexpr float LIMIT = 7.0f, ALPHA = 1.702f;  // gpt-oss (OpenAI, 2025)
        Floats most = broadcast(LIMIT);
        gate = gate < most ? gate : most;
        up = max(up < most ? up : most, -most);
        return (up + 1.0f) * gate / (1.0f + exponential(-ALPHA * gate));
    }

    const Weights& w_;
    const Assignment& a_;
    Buffer* in_;
    Buffer* out_;
    const int num_threads_, num_blocks_;
    int blocks_per_chunk_ = 1, chunks_per_panel_ = 1;
};

class Refit final : public Phase {
  public:
    Refit(const Assignment* pairs, Buffer* in, Buffer* out) : a_(*pairs), in_(in), out_(out) {}

    int begin(const Step& step) override { return (int)step.num_tokens * a_.top_k; }

    void compute(const Step&, int row, int) override {
        if (row >= a_.starts[a_.num_experts]) return;
        int written = (in_->width + weights::OUTPUTS - 1) / weights::OUTPUTS * weights::OUTPUTS;
        memset(in_->row(row) + written, 0, (step::padded(in_->width) - written) * sizeof(float));
        rows::prepare_row(in_->row(row), out_->prepared, row);
    }

  private:
    const Assignment& a_;
    Buffer* in_;
    Buffer* out_;
};

// A chunk is some blocks of outputs of all experts.
class Down final : public Phase {
  public:
    // `adds`: to what is in `out`
    Down(const Weights* weights, const Assignment* pairs, Buffer* in, Buffer* out, bool adds, int num_threads)
        : w_(*weights), a_(*pairs), in_(in), out_(out), adds_(adds), num_threads_(num_threads),
          num_blocks_(weights::num_blocks(*w_.down[0])) {}

    // A chunk reads its blocks of every expert that is chosen, and of one of them CHUNK_BYTES at most: fewer where there are
    // more threads than such chunks.
    int begin(const Step& step) override {
        int64_t num_pairs = step.num_tokens * a_.top_k;
        if (num_pairs == 0) return 0;
        size_t chosen = num_pairs < a_.num_experts ? num_pairs : a_.num_experts, bytes = weights::block_bytes(*w_.down[0]);
        size_t wanted = bytes * num_blocks_ / (layers::CHUNKS_OF_THREAD * num_threads_), least = layers::CHUNK_BYTES / chosen;
        wanted = wanted < least ? least : wanted > layers::CHUNK_BYTES ? layers::CHUNK_BYTES : wanted;
        blocks_per_chunk_ = bytes >= wanted ? 1 : (int)(wanted / bytes);
        return (num_blocks_ + blocks_per_chunk_ - 1) / blocks_per_chunk_;
    }

    void compute(const Step& step, int chunk, int) override {
        int first = chunk * blocks_per_chunk_;
        int last = first + blocks_per_chunk_ < num_blocks_ ? first + blocks_per_chunk_ : num_blocks_;
        int width = (last - first) * weights::OUTPUTS;
        for (int64_t token = 0; !adds_ && token < step.num_tokens; token++)
            memset(out_->row(token) + first * weights::OUTPUTS, 0, width * sizeof(float));
        for (int e = chosen(0), next; e < a_.num_experts; e = next) {
            next = chosen(e + 1);
            if (next < a_.num_experts) prefetch_begin(*w_.down[next], first);
            for (int block = first; block < last; block++) multiply(e, block);
        }
    }

  private:
    // The first expert from this one on that has rows.
    int chosen(int expert) const {
        while (expert < a_.num_experts && a_.starts[expert] == a_.starts[expert + 1]) expert++;
        return expert;
    }

    void multiply(int expert, int block) const {
        const float* bias = w_.down_bias ? w_.down_bias + (size_t)expert * num_blocks_ * weights::OUTPUTS : nullptr;
        auto use = [&](int row, const Floats* sums) {
            float weight = a_.weights[a_.pairs[row]];
            float* to = out_->row(a_.pairs[row] / a_.top_k) + block * weights::OUTPUTS;
            for (int v = 0; v < VECTORS; v++) {
                Floats value = bias ? sums[v] + load<Floats>(bias + block * weights::OUTPUTS + v * LANES) : sums[v];
                store(to + v * LANES, load<Floats>(to + v * LANES) + value * weight);
            }
        };
        product::multiply(*w_.down[expert], in_->prepared, a_.starts[expert], a_.starts[expert + 1], block, use);
    }

    const Weights& w_;
    const Assignment& a_;
    Buffer* in_;
    Buffer* out_;
    const bool adds_;
    const int num_threads_, num_blocks_;
    int blocks_per_chunk_ = 1;
};

// Rows times the sigmoid of the first number of other rows: the gate of shared experts.
class Weigh final : public Phase {
  public:
    Weigh(Buffer* gates, Buffer* rows) : gates_(gates), rows_(rows) {}

    int begin(const Step& step) override { return (int)step.num_tokens; }

    void compute(const Step&, int chunk, int) override {
        Floats weight = 1.0f / (1.0f + exponential(broadcast(-gates_->row(chunk)[0])));
        float* row = rows_->row(chunk);
        for (int i = 0; i < rows_->width; i += LANES) store(row + i, load<Floats>(row + i) * weight);
    }

  private:
    Buffer* gates_;
    Buffer* rows_;
};

}  // namespace experts
