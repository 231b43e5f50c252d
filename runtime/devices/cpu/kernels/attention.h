// Causal attention over the pages of the key/value cache, in place: nothing is gathered.
//
// A tile is a few queries of one row with heads that share a key/value head. Most tiles are one chunk, which goes through
// all parts of the keys. Where a tile is much of the step's work, as one long sequence is when it decodes alone, each part
// is a chunk of its own, and a second phase joins them (Dao et al., Flash-Decoding, 2023). Which of both it is does not
// change a bit: see scores.h.
#pragma once

#include <vector>

#include "scores.h"

namespace attention {

using namespace simd;
using scores::Layer;
using scores::PART;
using scores::Scratch;
using scores::Sums;
using scores::Tile;
using step::Buffer;
using step::Phase;
using step::Step;

constexpr int CHUNKS_PER_THREAD = 4;  // a tile that is more work than one of so many equal chunks is split
constexpr size_t MAX_PARTIAL_BYTES = 64 << 20;  // of results of parts; tiles beyond it are not split

// The memory of all threads, which the layers of a program share: one layer is computed at a time.
class Scratches {
  public:
    explicit Scratches(int num_threads) : each_(num_threads) {
        for (auto& scratch : each_) scratch = (Scratch*)step::allocate(sizeof(Scratch));
    }
    ~Scratches() {
        for (auto* scratch : each_) free(scratch);
        free(partials_);
    }
    Scratches(const Scratches&) = delete;

    int num_threads() const { return (int)each_.size(); }
    Scratch& of(int thread) const { return *each_[thread]; }
    float* partials() const { return partials_; }

    // Room for results of parts. False: there is no memory.
    bool reserve_partials(size_t bytes) {
        if (bytes <= partial_bytes_) return true;
        auto* memory = (float*)step::allocate(bytes);
        if (!memory) return false;
        free(partials_);
        partials_ = memory;
        partial_bytes_ = bytes;
        return true;
    }

  private:
    std::vector<Scratch*> each_;
    float* partials_ = nullptr;
    size_t partial_bytes_ = 0;
};

// Numbers of a head of a token, in rows of all heads or in a row for each head.
struct Lines {
    float* data;
    size_t per_token, per_head;

    Lines() = default;
    Lines(const Buffer& buffer, int dim, int64_t num_tokens)
        : data(buffer.numbers), per_token(step::padded(buffer.width)),
          per_head(buffer.heads == 1 ? (size_t)dim : per_token * num_tokens) {}
    float* at(int64_t token, int head) const { return data + token * per_token + head * per_head; }
};

class Attention final : public Phase {
  public:
    // `queries` have rows of all heads or a row for each head, as `out` has.
    Attention(Buffer* queries, Buffer* out, const Layer& layer, Scratches& scratches)
        : queries_buffer_(queries), out_buffer_(out), l_(layer), scratches_(scratches) {}

    int begin(const Step& step) override {
        int key_dim = l_.keys[0].dim + (l_.num_pieces > 1 ? l_.keys[1].dim : 0);
        queries_ = Lines(*queries_buffer_, key_dim, step.num_tokens);
        out_ = Lines(*out_buffer_, l_.values.dim, step.num_tokens);
        cut_tiles(step);
        split_tiles();
        int num_chunks = 0;
        for (auto& placed : tiles_) {
            placed.first_chunk = num_chunks;
            num_chunks += l_.num_kv_heads * (placed.is_split ? placed.tile.num_parts() : 1);
        }
        return num_chunks;
    }

    void compute(const Step& step, int chunk, int thread) override {
        Scratch& s = scratches_.of(thread);
        cache::for_kind(l_.kind, [&](auto kind) { compute_kind<decltype(kind)::value>(step, chunk, s); });
    }

    // ---- for Join: vectors of tiles that are split, one after another

    int num_split_vectors() const { return num_split_; }

    void join_vector(int index, Scratch& s) const {
        const Placed* placed = nullptr;
        for (auto& each : tiles_) {
            int count = each.is_split ? each.tile.vectors() * l_.num_kv_heads : 0;
            placed = &each;
            if (index < count) break;
            index -= count;
        }
        const Tile& tile = placed->tile;
        int kv_head = index / tile.vectors(), vector = index % tile.vectors();
        Sums sums = empty(s.out);
        for (int part = 0; part < tile.num_parts(); part++) {
            const float* from = partial(*placed, kv_head, part, vector);
            scores::join(sums, from, from[l_.value_width()], from[l_.value_width() + 1], l_.value_width());
        }
        give_result(*placed, kv_head, vector, sums);
    }

  private:
    struct Placed {
        Tile tile;
        int first_token;  // of the row in the step
        bool is_split;
        size_t first_partial;
        int first_chunk;
    };

    void cut_tiles(const Step& step) {
        tiles_.clear();
        int group = l_.group(), heads = group < scores::MAX_VECTORS ? group : scores::MAX_VECTORS;
        int at_once = scores::MAX_VECTORS / heads, first_token = 0;
        for (int row = 0; row < step.num_rows; row++) {
            for (int i = 0; i < step.counts[row]; i += at_once) {
                int count = step.counts[row] - i < at_once ? step.counts[row] - i : at_once;
                int64_t position = step.starts[row] + i;
                int64_t oldest = l_.window && position >= l_.window ? position - l_.window + 1 : 0;
                for (int head = 0; head < group; head += heads) {
                    int num_heads = group - head < heads ? group - head : heads;
                    tiles_.push_back(
                        {{row, i, count, head, num_heads, oldest, step.last_seen(position + count - 1)}, first_token});
                }
            }
            first_token += step.counts[row];
        }
    }

    static int64_t work_of(const Tile& tile) { return (tile.last - tile.oldest + 1) * (tile.vectors() + 8); }  // 8: to read a key

    void split_tiles() {
        int64_t total = 0;
        for (auto& placed : tiles_) total += work_of(placed.tile) * l_.num_kv_heads;
        int64_t most = total / (CHUNKS_PER_THREAD * scratches_.num_threads());
        size_t floats = 0;
        num_split_ = 0;
        for (auto& placed : tiles_) {
            const Tile& tile = placed.tile;
            size_t more = (size_t)tile.num_parts() * l_.num_kv_heads * tile.vectors() * partial_width();
            placed.is_split = scratches_.num_threads() > 1 && tile.num_parts() > 1 && work_of(tile) > most &&
                              (floats + more) * sizeof(float) <= MAX_PARTIAL_BYTES;
            placed.first_partial = floats;
            if (!placed.is_split) continue;
            floats += more;
            num_split_ += tile.vectors() * l_.num_kv_heads;
        }
        if (scratches_.reserve_partials(floats * sizeof(float))) return;
        for (auto& placed : tiles_) placed.is_split = false;
        num_split_ = 0;
    }

    int partial_width() const { return l_.value_width() + LANES; }

    float* partial(const Placed& placed, int kv_head, int part, int vector) const {
        size_t index = ((size_t)kv_head * placed.tile.num_parts() + part) * placed.tile.vectors() + vector;
        return scratches_.partials() + placed.first_partial + index * partial_width();
    }

    const Placed& tile_of(int chunk) const {
        size_t low = 0, high = tiles_.size();  // the last tile that begins at the chunk or before it
        while (high - low > 1) {
            size_t middle = (low + high) / 2;
            (tiles_[middle].first_chunk <= chunk ? low : high) = middle;
        }
        return tiles_[low];
    }

    template <step::Number KIND> void compute_kind(const Step& step, int chunk, Scratch& s) {
        const Placed& placed = tile_of(chunk);
        const Tile& tile = placed.tile;
        int kv_head = (chunk - placed.first_chunk) % l_.num_kv_heads;
        int part = (chunk - placed.first_chunk) / l_.num_kv_heads;
        scores::Worker<KIND> worker(l_, s);
        int64_t position = step.starts[tile.row] + tile.first;
        for (int i = 0; i < tile.vectors(); i++)
            worker.take_query(i, queries_.at(token_of(placed, i), head_of(tile, kv_head, i)));
        if (placed.is_split) {
            worker.compute(step, tile, kv_head, tile.first_part() + part, position);
            return keep_partials(placed, kv_head, part, s);
        }
        int width = l_.value_width();
        for (int i = 0; i < tile.vectors(); i++) s.sums[i] = empty(s.out + i * width);
        for (part = 0; part < tile.num_parts(); part++) {
            worker.compute(step, tile, kv_head, tile.first_part() + part, position);
            for (int i = 0; i < tile.vectors(); i++)
                scores::join(s.sums[i], s.part + i * width, s.part_most[i], s.part_total[i], width);
        }
        for (int i = 0; i < tile.vectors(); i++) give_result(placed, kv_head, i, s.sums[i]);
    }

    void keep_partials(const Placed& placed, int kv_head, int part, const Scratch& s) const {
        int width = l_.value_width();
        for (int i = 0; i < placed.tile.vectors(); i++) {
            float* to = partial(placed, kv_head, part, i);
            memcpy(to, s.part + i * width, width * sizeof(float));
            to[width] = s.part_most[i];
            to[width + 1] = s.part_total[i];
        }
    }

    Sums empty(float* out) const {
        memset(out, 0, l_.value_width() * sizeof(float));
        return {out, scores::HIDDEN, 0};
    }

    int head_of(const Tile& tile, int kv_head, int vector) const {
        return kv_head * l_.group() + tile.first_head + vector % tile.num_heads;
    }

    static int64_t token_of(const Placed& placed, int vector) {
        return placed.first_token + placed.tile.first + vector / placed.tile.num_heads;
    }

    __attribute__((noinline)) void give_result(const Placed& placed, int kv_head, int vector, const Sums& sums) const {
        int head = head_of(placed.tile, kv_head, vector);
        float total = sums.total, scale = 1;
        if (l_.sinks) {  // a score without a value (Xiao et al., 2023)
            float most = l_.sinks[head] > sums.most ? l_.sinks[head] : sums.most;
            scale = exponential(broadcast(sums.most - most))[0];
            total = total * scale + exponential(broadcast(l_.sinks[head] - most))[0];
        }
        scale = scale / total * l_.value_scale;
        float* to = out_.at(token_of(placed, vector), head);
        for (int d = 0; d < l_.values.dim; d += LANES) {
            Floats x = load<Floats>(sums.out + d) * scale;
            int left = l_.values.dim - d;
            memcpy(to + d, &x, (left < LANES ? left : LANES) * sizeof(float));
        }
    }

    Buffer* queries_buffer_;
    Buffer* out_buffer_;
    const Layer l_;
    Scratches& scratches_;
    Lines queries_, out_;
    std::vector<Placed> tiles_;
    int num_split_ = 0;
};

// Joins the parts of tiles that Attention has split.
class Join final : public Phase {
  public:
    Join(const Attention& attention, const Scratches& scratches) : attention_(attention), scratches_(scratches) {}

    int begin(const Step&) override { return attention_.num_split_vectors(); }
    void compute(const Step&, int chunk, int thread) override {
        attention_.join_vector(chunk, scratches_.of(thread));
    }

  private:
    const Attention& attention_;
    const Scratches& scratches_;
};

}  // namespace attention
