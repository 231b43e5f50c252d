// Log probabilities from rows of logits.
#pragma once

#include <vector>

#include "logits.h"
#include "team.h"

namespace sampling {

// Log probabilities of one token of each row and of the `width` likeliest ones, which come in falling order.
class Logprobs final : public team::Work {
  public:
    struct Out {
        float* chosen;  // [rows]
        int32_t* ids;  // [rows, width]
        float* top;  // [rows, width]
    };

    void run(team::Team* team, const Logits& logits, const int64_t* targets, int width, const Out& out) {
        logits_ = logits;
        targets_ = targets;
        width_ = width;
        out_ = out;
        size_t blocks = logits.num_rows * logits.num_blocks();
        maxima_.resize(blocks);
        sums_.resize(blocks);
        best_.resize(blocks);
        team::run(team, this);
    }

    int num_phases() const override { return 3; }
    int num_chunks(int phase) const override { return (int)logits_.num_rows * (phase == 2 ? 1 : logits_.num_blocks()); }

    void compute(int phase, int chunk, int) override {
        if (phase == 2) return finish(chunk);
        int row = chunk / logits_.num_blocks(), block = chunk % logits_.num_blocks();
        if (phase == 1) return sum_up(row, block, chunk);
        const Row numbers{logits_.row(row), nullptr};
        maxima_[chunk] = largest_of(numbers, logits_.begin(block), logits_.end(block));
        find_best(numbers, logits_.begin(block), logits_.end(block), width_, best_[chunk]);
    }

  private:
    float largest_of_row(int row) const {
        const float* first = &maxima_[(size_t)row * logits_.num_blocks()];
        return *std::max_element(first, first + logits_.num_blocks());
    }

    void sum_up(int row, int block, int chunk) {
        Sum sum;
        for_weights(Row{logits_.row(row), nullptr}, logits_.begin(block), logits_.end(block), largest_of_row(row), 1.0f,
                    [&](int64_t, Floats weight) { sum.add(weight); });
        sums_[chunk] = sum.total();
    }

    void finish(int row) {
        size_t first = (size_t)row * logits_.num_blocks();
        double total = 0;
        std::vector<uint64_t> best;
        for (int block = 0; block < logits_.num_blocks(); block++) {
            total += sums_[first + block];
            best.insert(best.end(), best_[first + block].begin(), best_[first + block].end());
        }
        std::sort(best.begin(), best.end(), [](uint64_t a, uint64_t b) { return a < b; });
        float norm = largest_of_row(row) + (float)log(total);
        out_.chosen[row] = clean(broadcast(logits_.row(row)[targets_[row]]))[0] - norm;
        for (int i = 0; i < width_; i++) {
            out_.ids[(size_t)row * width_ + i] = (int32_t)id_of(best[i]);
            out_.top[(size_t)row * width_ + i] = value_of(best[i]) - norm;
        }
    }

    Logits logits_{};
    const int64_t* targets_ = nullptr;
    int width_ = 0;
    Out out_{};
    std::vector<float> maxima_;  // [rows, blocks]
    std::vector<double> sums_;  // [rows, blocks]
    std::vector<std::vector<uint64_t>> best_;  // [rows, blocks]
};

}  // namespace sampling
