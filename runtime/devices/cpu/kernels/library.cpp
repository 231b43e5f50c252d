// What Python calls (library.py declares the same functions). Plain C types only. Handles are pointers.

#include "attention_call.h"
#include "digest.h"
#include "experts.h"
#include "experts_call.h"
#include "latent.h"
#include "layers.h"
#include "logprobs.h"
#include "lora.h"
#include "product_call.h"
#include "program.h"
#include "quantize.h"
#include "recurrent_call.h"
#include "refused.h"
#include "screen.h"
#include "sampling.h"
#include "team.h"

using layers::Heads;
using layers::RotaryTables;
using program::Program;
using step::Buffer;
using step::Phase;
using step::Step;
using weights::Matrix;

extern "C" {

// ---- facts of this build

int kernels_lanes() { return simd::LANES; }
int kernels_outputs() { return weights::OUTPUTS; }
int64_t kernels_packing() { return PACKING_DIGEST; }  // of the sources that say how weights are packed: build.py
int kernels_input_form(int kind) { return weights::input_form((weights::Kind)kind); }

// ---- threads

team::Team* kernels_start(int num_threads) { return team::start(num_threads); }
void kernels_stop(team::Team* team) { team::stop(team); }

// Reads all bytes once, and returns the sum of their words: how fast memory is.
int64_t kernels_read(team::Team* team, const uint32_t* data, int64_t bytes) {
    constexpr int64_t PIECE = 1 << 20;
    std::atomic<int64_t> total{0};
    team::for_blocks(team, (int)(bytes / PIECE), [&](int piece) {
        const uint32_t* at = data + piece * (PIECE / 4);
        simd::Words sums[8] = {};
        for (int64_t i = 0; i < PIECE / 4; i += 8 * simd::LANES)
            for (int k = 0; k < 8; k++) sums[k] += simd::load<simd::Words>(at + i + k * simd::LANES);
        for (int k = 1; k < 8; k++) sums[0] += sums[k];
        int64_t sum = 0;
        for (int i = 0; i < simd::LANES; i++) sum += sums[0][i];
        total.fetch_add(sum);
    });
    return total.load();
}

// The digest of pieces of 1 MB, the first of which is number `first` of all. Without a team the caller's thread reads.
int64_t kernels_digest(team::Team* team, const uint32_t* data, int64_t pieces, int64_t first) {
    std::atomic<uint64_t> total{0};
    auto add = [&](int64_t piece) {
        total.fetch_add(digest::of_piece(data + piece * (digest::PIECE / 4), first + piece));
    };
    if (team) team::for_blocks(team, (int)pieces, add);
    else for (int64_t piece = 0; piece < pieces; piece++) add(piece);
    return (int64_t)total.load();
}

// ---- weights

int64_t kernels_packed_bytes(int kind, int outputs, int inputs, int group) {
    int multiple = weights::input_multiple((weights::Kind)kind, group);
    int width = (inputs + multiple - 1) / multiple * multiple;
    Matrix w{(weights::Kind)kind, outputs, inputs, width, group, nullptr, nullptr, nullptr};
    return (int64_t)weights::num_blocks(w) * weights::block_bytes(w);
}

// A matrix over memory of the caller: `data` of kernels_packed_bytes, for INT8 also `scales` and `sums` of whole blocks.
Matrix* kernels_matrix(int kind, int outputs, int inputs, int group, char* data, float* scales, int32_t* sums) {
    int multiple = weights::input_multiple((weights::Kind)kind, group);
    int width = (inputs + multiple - 1) / multiple * multiple;
    return new Matrix{(weights::Kind)kind, outputs, inputs, width, group, data, scales, sums};
}

// One matrix of several, whose outputs follow each other. They stay the caller's, and must outlive it.
Matrix* kernels_join(Matrix** parts, int num_parts) {
    auto** own = new const Matrix*[num_parts];
    auto* whole = new Matrix(*parts[0]);
    whole->outputs = 0;
    for (int i = 0; i < num_parts; i++) {
        parts[i]->first_block = weights::num_blocks(*whole);
        whole->outputs += parts[i]->outputs;
        own[i] = parts[i];
    }
    whole->parts = own;
    whole->num_parts = num_parts;
    return whole;
}

void kernels_free_matrix(Matrix* matrix) {
    delete[] matrix->parts;
    delete matrix;
}

// The numbers of a matrix lie elsewhere from now on.
void kernels_move_matrix(Matrix* matrix, const char* data, const float* scales, const int32_t* sums) {
    matrix->data = data;
    matrix->scales = scales;
    matrix->sums = sums;
}

void kernels_pack(team::Team* team, const Matrix* w, const void* source) {
    team::for_blocks(team, weights::num_blocks(*w), [=](int block) {
        weights::pack_block(*w, source, block, const_cast<char*>(w->data), const_cast<int32_t*>(w->sums));
    });
}

void kernels_pack_int4(team::Team* team, const Matrix* w, const uint8_t* codes, const float* scales, const uint8_t* zeros) {
    team::for_blocks(team, weights::num_blocks(*w), [=](int block) {
        weights::pack_int4_block(*w, codes, scales, zeros, block, const_cast<char*>(w->data));
    });
}

// Rows [rows, inputs] of numbers of quantize::Source: `codes` [rows, inputs] int8, or [rows, inputs / 2] with groups, and
// `scales` [rows, groups]. `group` 0: INT8.
void kernels_quantize(team::Team* team, int source, const char* from, int64_t rows, int inputs, int group, char* codes,
                      float* scales) {
    constexpr int TOGETHER = 16;  // rows of a chunk
    size_t row_bytes = (size_t)inputs * (source == quantize::FLOAT32 ? 4 : 2);
    int groups = group ? (inputs + group - 1) / group : 1;
    team::for_blocks(team, (int)((rows + TOGETHER - 1) / TOGETHER), [=](int chunk) {
        for (int64_t i = (int64_t)chunk * TOGETHER; i < rows && i < (int64_t)(chunk + 1) * TOGETHER; i++) {
            const char* row = from + i * row_bytes;
            auto kind = (quantize::Source)source;
            if (group) quantize::int4_row(kind, row, inputs, group, (uint8_t*)codes + i * (inputs / 2), scales + i * groups);
            else scales[i] = quantize::int8_row(kind, row, inputs, (int8_t*)codes + i * inputs);
        }
    });
}

// FLOAT8 and MXFP4: see float8::pack_block.
void kernels_pack_float8(team::Team* team, const Matrix* w, const uint8_t* codes, const void* scales) {
    team::for_blocks(team, weights::num_blocks(*w), [=](int block) {
        float8::pack_block(*w, codes, scales, block, const_cast<char*>(w->data) + block * weights::block_bytes(*w));
    });
}

// Row i of the matrix lies at rows + order[i] * stride, in ggml's type of the matrix.
void kernels_pack_ggml(team::Team* team, const Matrix* w, const uint8_t* rows, int64_t stride, const int64_t* order) {
    team::for_blocks(team, weights::num_blocks(*w), [=](int block) {
        weights::pack_ggml_block(*w, rows, stride, order, block, const_cast<char*>(w->data));
    });
}

// Fills the blocks from `first` up to `end` of `rough`, Q5_0 of the head's size, and of `bounds`: see screen::Screen.
void kernels_screen(team::Team* team, const Matrix* head, const Matrix* rough, float* bounds, int first, int end) {
    constexpr int TOGETHER = 16;  // blocks of a chunk
    float* lengths = bounds + (size_t)weights::num_blocks(*head) * weights::OUTPUTS;
    team::for_blocks(team, (end - first + TOGETHER - 1) / TOGETHER, [=](int chunk) {
        std::vector<float> row(head->inputs);
        int begin = first + chunk * TOGETHER;
        for (int block = begin; block < end && block < begin + TOGETHER; block++)
            screen::make_block(*head, *rough, block, row.data(), bounds, lengths);
    });
}

// Rows of the matrix as float32 [count, inputs].
void kernels_unpack(const Matrix* w, const int64_t* outputs, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) weights::unpack_row(*w, (int)outputs[i], out + i * w->inputs);
}

// ---- products

product_call::Product* kernels_product() { return new product_call::Product; }
void kernels_free_product(product_call::Product* product) { delete product; }

// step->output [tokens, outputs] = step->input [tokens, inputs] W^T. 0; 1: there is no memory.
int kernels_multiply(team::Team* team, product_call::Product* product, const Matrix* matrix, const Step* step) {
    bool has_memory = true;
    product->run(team, matrix, step, &has_memory);
    return has_memory ? 0 : 1;
}

// The same by a team of one thread. 2: the processor refused an instruction; the team and the product must not be used
// again.
int kernels_try_multiply(team::Team* team, product_call::Product* product, const Matrix* matrix, const Step* step) {
    int result = 2;
    refused::runs([&] { result = kernels_multiply(team, product, matrix, step); });
    return result;
}

// ---- attention

attention::Call* kernels_attention(team::Team* team) { return new attention::Call(team::num_threads(team)); }
void kernels_free_attention(attention::Call* call) { delete call; }

// step->output [tokens, heads * dim] from queries step->input, over the pages. 0; 1: there is no memory.
int kernels_attend(team::Team* team, attention::Call* call, const Heads* heads, const Step* step) {
    return call->run(team, *heads, *step) ? 0 : 1;
}

// ---- experts

// Matrices of experts, which must outlive them, and their biases if there are any: see experts::Weights.
experts::Weights* kernels_experts(int act, int count, Matrix* const* gate_up, Matrix* const* down,
                                  const float* gate_up_bias, const float* down_bias) {
    return new experts::Weights{(experts::Act)act, {gate_up, gate_up + count}, {down, down + count}, gate_up_bias, down_bias};
}

// Their biases lie elsewhere from now on.
void kernels_move_experts(experts::Weights* weights, const float* gate_up_bias, const float* down_bias) {
    weights->gate_up_bias = gate_up_bias;
    weights->down_bias = down_bias;
}

void kernels_free_experts(experts::Weights* weights) { delete weights; }

experts_call::Call* kernels_experts_call() { return new experts_call::Call; }
void kernels_free_experts_call(experts_call::Call* call) { delete call; }

// step->output [tokens, width] from step->input [tokens, width], ids and weights [tokens, top_k]. 0; 1: there is no
// memory.
int kernels_apply_experts(team::Team* team, experts_call::Call* call, const experts::Weights* weights, int top_k, const int32_t* ids,
                const float* shares, const Step* step) {
    experts::Assignment pairs(weights->count(), top_k);
    return call->run(team, weights, &pairs, ids, shares, step) ? 0 : 1;
}

// ---- latent attention

latent::Call* kernels_latent(team::Team* team, const latent::Latents* latents) {
    return new latent::Call(team::num_threads(team), *latents);
}
void kernels_free_latent(latent::Call* call) { delete call; }

// step->output [tokens, heads * value_dim] from queries step->input, over the pages. 0; 1: there is no memory.
int kernels_attend_latents(team::Team* team, latent::Call* call, const latent::Latents* latents, const Step* step) {
    return call->run(team, *latents, *step) ? 0 : 1;
}

// ---- recurrent layers

recurrent::Call* kernels_recurrent(team::Team* team) { return new recurrent::Call(team::num_threads(team)); }
void kernels_free_recurrent(recurrent::Call* call) { delete call; }

// 0; 1: there is no memory.
int kernels_recur(team::Team* team, recurrent::Call* call, const recurrent::Layer* layer, const recurrent::Rows* rows,
                  const recurrent::Tokens* tokens, int convolves_only) {
    return call->run(team, *layer, *rows, *tokens, convolves_only != 0) ? 0 : 1;
}

// ---- programs

Program* kernels_program(team::Team* team) { return new Program(team); }
void kernels_free_program(Program* program) { delete program; }

Buffer* program_buffer(Program* program, int width, int form) { return program->add_buffer(width, form); }
RotaryTables* program_rotary(Program* program) { return program->add_rotary(); }

void program_set_rotary(RotaryTables* tables, const float* cos, const float* sin) { *tables = {cos, sin}; }

void program_embed(Program* program, const Matrix* packed, const void* table, int number, float scale, Buffer* out) {
    program->add(new layers::Embedding(packed, (const char*)table, (step::Number)number, scale, out));
    program->add(new layers::Replace(out));
}

void program_output(Program* program, Buffer* in) { program->add(new layers::Output(in)); }

void program_prepare(Program* program, Buffer* in, const float* norm, float eps, Buffer* out, int then) {
    program->add(new layers::Prepare(in, norm, eps, out, (layers::Prepare::Then)then));
}

void program_linear(Program* program, const Matrix* weight, const float* bias, Buffer* in, Buffer* out, int then, float scale) {
    auto what = (layers::Linear::Then)then;
    bool halves_fit = weight->outputs % (2 * weights::OUTPUTS) == 0;
    if (what < layers::Linear::SILU_AND_MUL || halves_fit) {
        program->add(new layers::Linear(weight, bias, in, out, what, program->num_threads(), scale));
        return;
    }
    Buffer* both = program->add_buffer(weight->outputs, -1);
    program->add(new layers::Linear(weight, bias, in, both, layers::Linear::STORE, program->num_threads()));
    program->add(new layers::ActAndMul(both, out, what, scale));
}

// Logits of the step's samples, behind the last norm; `in` are rows as the head takes them.
void program_head(Program* program, Buffer* x, const float* norm, float eps, Buffer* in, const Matrix* weight) {
    program->add(new layers::PrepareSamples(x, norm, eps, in));
    program->add(new layers::Head(weight, in, program->num_threads()));
}

// The same, by a screen where there is one and a step wants no more than the first of the largest logits; `rough_in` are
// rows as its matrix takes them.
screen::Pass* program_screened_head(Program* program, Buffer* x, const float* norm, float eps, Buffer* in, const Matrix* weight,
                                    Buffer* rough_in) {
    auto* pass = program->add_pass(*weight, in, rough_in);
    program->add(new layers::PrepareSamples(x, norm, eps, in));
    auto* approach = new screen::Approach(pass);
    program->add(approach);
    auto* bounds = new screen::Bounds(pass, program->num_threads());
    program->add(bounds);
    program->add(new screen::Limits(pass, approach, bounds));
    program->add(new screen::Head(pass, program->num_threads()));
    return pass;
}

// `bounds` [2, outputs padded to whole blocks]: what kernels_screen has left there.
void program_set_screen(screen::Pass* pass, const Matrix* rough, const float* bounds, float longest) {
    pass->set({rough, bounds, bounds + (size_t)pass->num_blocks * weights::OUTPUTS, longest});
}

// Blocks of the head that the latest step has computed by its screen; -1: it had none.
int64_t program_screened_blocks(const screen::Pass* pass) { return pass->is_on ? pass->computed.load() : -1; }

// act(scale * gate) * up of rows [gate, up], where something is added between the product and this.
void program_act(Program* program, Buffer* in, Buffer* out, int act, float scale) {
    program->add(new layers::ActAndMul(in, out, (layers::Linear::Then)act, scale));
}

void program_lora(Program* program, Buffer* in, const float* norm, float eps, const lora::Weights* weights, Buffer* out) {
    program->add(new lora::Lora(in, norm, eps, *weights, out));
}

void program_attention(Program* program, Buffer* qkv, Buffer* out, const Heads* heads) {
    program->add(new layers::PrepareHeads(qkv, *heads));
    auto* attention = new attention::Attention(qkv, out, attention::layer_of(*heads), program->scratches());
    program->add(attention);
    program->add(new attention::Join(*attention, program->scratches()));
}

// A buffer of a row for each pair of token and expert.
Buffer* program_pair_buffer(Program* program, int width, int form, int top_k) {
    return program->add_buffer(width, form, top_k);
}

experts::Assignment* program_assignment(Program* program, int num_experts, int top_k) {
    return program->add_assignment(num_experts, top_k);
}

experts::Counter* program_counter(Program* program) { return program->add_counter(); }
void program_set_counter(experts::Counter* counter, int32_t* counts) { counter->counts = counts; }

void program_route(Program* program, Buffer* logits, const experts::Routing* routing, const float* bias,
                   experts::Assignment* pairs) {
    program->add(new experts::Route(logits, *routing, bias, pairs));
}

// From floats to floats; `inputs`, `inner` and `refit` have a row for each pair.
void program_experts(Program* program, const experts::Weights* weights, experts::Assignment* pairs,
                     experts::Counter* counter, Buffer* in, Buffer* inputs, Buffer* inner, Buffer* refit, Buffer* out,
                     int adds) {
    program->add(new experts::Sort(pairs, counter));
    program->add(new experts::Spread(pairs, in, inputs));
    program->add(new experts::GateUp(weights, pairs, inputs, inner, program->num_threads()));
    program->add(new experts::Refit(pairs, inner, refit));
    program->add(new experts::Down(weights, pairs, refit, out, adds != 0, program->num_threads()));
}

void program_weigh(Program* program, Buffer* gates, Buffer* rows) { program->add(new experts::Weigh(gates, rows)); }

void program_keep_latents(Program* program, Buffer* down, Buffer* queries, const latent::Latents* latents) {
    program->add(new latent::Keep(down, queries, *latents));
}

void program_latent_attention(Program* program, Buffer* queries, Buffer* out, const latent::Buffers* rows,
                              const latent::Latents* latents) {
    latent::add_phases(queries, out, *rows, *latents, program->scratches(), program->num_threads(), [&](Phase* phase) { program->add(phase); });
}

void program_columns(Program* program, Buffer* in, const recurrent::Run* runs, int num_runs, Buffer* out) {
    program->add(new recurrent::Columns(in, runs, num_runs, out));
}

void program_multiply(Program* program, const recurrent::Place* a, const recurrent::Place* b, int is_sigmoid, Buffer* out) {
    program->add(new recurrent::Multiply(*a, *b, is_sigmoid != 0, out));
}

// A recurrent layer between its products, or a gated convolution; `layer` and `kept` must outlive the program. 0; 1: there
// is no memory.
int program_recurrent(Program* program, const recurrent::Layer* layer, const recurrent::Kept* kept,
                      const recurrent::Between* rows, int is_conv) {
    recurrent::Mixer mixer{layer, kept, *rows};
    program->add(new recurrent::Keep(mixer));
    program->add(new recurrent::Convolve(mixer));
    if (is_conv) {
        program->add(new recurrent::GateConvolved(mixer));
        return 0;
    }
    if (!program->recurrent_scratches().reserve(*layer)) return 1;
    program->add(new recurrent::Recur(mixer, program->recurrent_scratches()));
    program->add(new recurrent::NormTokens(mixer));
    return 0;
}

int program_size(Program* program) { return program->size(); }

// Phases `first` to `end`, which is not one of them. 0; 1: there is no memory for its buffers.
int program_run(Program* program, const Step* step, int first, int end) {
    return program->run(*step, first, end) ? 0 : 1;
}

// ---- sampling

sampling::Sampler* kernels_sampler(team::Team* team) { return new sampling::Sampler(team::num_threads(team)); }
void kernels_free_sampler(sampling::Sampler* sampler) { delete sampler; }

// A token for each row of logits. `masks` null: all tokens may be chosen. `choices` null: the largest logit's.
void kernels_sample(team::Team* team, sampling::Sampler* sampler, const sampling::Logits* logits,
                    const sampling::Masks* masks, const sampling::Sampler::Choices* choices, int64_t* tokens) {
    sampler->run(team, *logits, masks ? *masks : sampling::Masks{}, choices ? *choices : sampling::Sampler::Choices{}, tokens);
}

// Bans in the logits what masks exclude.
void kernels_mask(team::Team* team, const sampling::Logits* logits, const sampling::Masks* masks) {
    int blocks = logits->num_blocks();
    team::for_blocks(team, (int)masks->count * blocks, [=](int chunk) {
        int index = chunk / blocks;
        sampling::mask_block(*logits, masks->rows[index], chunk % blocks, masks->of(index, *logits));
    });
}

// Penalties of `count` rows, by rows `at` of what sequences have seen.
void kernels_penalise(team::Team* team, const sampling::Logits* logits, const int64_t* rows, const int64_t* at,
                      int64_t count, const sampling::Seen* seen) {
    int blocks = logits->num_blocks();
    team::for_blocks(team, (int)count * blocks, [=](int chunk) {
        sampling::penalise_block(*logits, rows[chunk / blocks], chunk % blocks, *seen, at[chunk / blocks]);
    });
}

// Log probabilities of `targets` and of the `width` likeliest tokens.
void kernels_logprobs(team::Team* team, const sampling::Logits* logits, const int64_t* targets, int width,
                      float* chosen, int32_t* ids, float* top) {
    sampling::Logprobs logprobs;
    logprobs.run(team, *logits, targets, width, {chosen, ids, top});
}

}  // extern "C"
