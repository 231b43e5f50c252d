// What all phases of a program share: the step at hand, and rows of numbers that one phase leaves for another.
#pragma once

#include <stdlib.h>

#include "rows.h"

namespace recurrent {
struct Rows;
}

namespace step {

enum Number { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, E4M3 = 3, E5M2 = 4 };  // of tables and caches

constexpr int MAX_POOLS = 2;  // KV cache groups: layers with full attention, and those with a window

// The tokens of a step in one line, row after row. Python fills it (program.py has the same fields).
struct Step {
    int64_t num_tokens;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* locations[MAX_POOLS];     // where each token's key and value go, by pool
    int64_t num_rows;
    const int32_t* slots;                    // [rows]
    const int64_t* starts;                   // [rows]: tokens of the slot before the row
    const int32_t* counts;                   // [rows]: tokens of the row
    const int32_t* page_tables[MAX_POOLS];   // [slots, pages_per_slot]
    int64_t pages_per_slot;
    int64_t page_size;
    const float* input;                      // [tokens, width] where a program does not begin with an embedding
    float* output;                           // [tokens, width] of the last phase
    const int32_t* lora_slots;               // [tokens], -1: no adapter; null: no token has one
    int64_t num_embeds;                      // tokens whose embeddings the request brought
    const int64_t* embed_places;             // [embeds]: their places among the tokens
    const float* embeds;                     // [embeds, width]
    int64_t num_samples;                     // tokens behind which logits are wanted
    const int64_t* sample_places;            // [samples]: their places among the tokens
    float* logits;                           // [samples, vocabulary padded to a multiple of 64]
    const recurrent::Rows* states;           // rows as recurrent layers see them; null: there are none
    int64_t block;                           // tokens of a block, to whose end each token attends; 0: to itself
    int64_t largest_only;                    // 1: of logits the first of the largest is wanted, the others may be what is below it

    // The last position that the token at `position` attends to.
    int64_t last_seen(int64_t position) const {
        return block ? position - position % block + block - 1 : position;
    }
};

inline void* allocate(size_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, 64, bytes + 64) == 0 ? memory : nullptr;
}

inline size_t padded(size_t width) { return (width + 63) / 64 * 64; }

// Rows that phases write and read: float32 [rows, padded width], or in the form in which products read them. A token
// has one row, or one for each of `heads`: then they lie head after head, [heads, tokens].
class Buffer {
  public:
    Buffer(int width, int form, int heads = 1) : width(width), form(form), heads(heads) {}
    ~Buffer() { free(memory_); }
    Buffer(const Buffer&) = delete;

    int width;
    int form;  // of rows::Form; -1: floats
    int heads = 1;
    float* numbers = nullptr;
    rows::Rows prepared{};

    // Other rows in the same memory, whose padding is not zero.
    void shape(int new_width, int new_form) {
        width = new_width;
        form = new_form;
        capacity_ = 0;
    }

    // Rows of the caller in place of memory of its own, until `shape`. False: they lack the padding.
    bool lend(float* rows) {
        if (form >= 0 || width != (int)padded(width)) return false;
        numbers = rows;
        return true;
    }

    // For so many tokens. False: there is no memory. Memory that is new is zero.
    bool reserve(int64_t num_tokens) {
        int64_t count = num_tokens * heads;
        if (count <= capacity_) return true;
        size_t total = padded(width) * count;
        auto kind = form < 0 ? rows::FLOAT32 : (rows::Form)form;
        size_t scales = form < 0 ? 0 : aligned((rows::is_grouped(kind) ? total / rows::GROUP : count) * 4);
        size_t data = aligned(total * rows::bytes_of(kind)), bytes = data + (kind == rows::HALVED ? 3 : 2) * scales;
        if (bytes > bytes_) {
            free(memory_);
            memory_ = (char*)allocate(bytes);
            bytes_ = memory_ ? bytes : 0;
            if (!memory_) return false;
            memset(memory_, 0, bytes);
        }
        numbers = (float*)memory_;
        prepared = {kind, (int)padded(width), memory_, (float*)(memory_ + data), (int32_t*)(memory_ + data + scales)};
        capacity_ = count;
        return true;
    }

    float* row(int64_t index) const { return numbers + index * padded(width); }

  private:
    static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

    char* memory_ = nullptr;
    size_t bytes_ = 0;
    int64_t capacity_ = 0;
};

// One phase of a program: chunks that may be computed in any order, by any thread.
class Phase {
  public:
    virtual ~Phase() = default;
    virtual int begin(const Step& step) = 0;  // -> the number of chunks
    virtual void compute(const Step& step, int chunk, int thread) = 0;
};

inline simd::Floats load_number(const char* at, Number kind) {
    if (kind == FLOAT32) return simd::load<simd::Floats>(at);
    return kind == BFLOAT16 ? simd::load_bf16((const uint16_t*)at) : simd::load_f16((const uint16_t*)at);
}

constexpr int bytes_of(Number kind) { return kind == FLOAT32 ? 4 : kind >= E4M3 ? 1 : 2; }

}  // namespace step
