// Packed weight matrices [outputs, inputs].
//
// Outputs are cut into blocks of OUTPUTS, inputs padded with zeros to a multiple of 64. Within a block the numbers of
// one input (or of the few inputs that one instruction multiplies) lie together for all outputs, so that a product
// reads memory in one line:
//
//   FLOAT32, FLOAT16   [block][input][output]
//   BFLOAT16           [block][input / 2][output][2]                               (fours on arm64 with i8mm)
//   INT8               [block][input / 4][output][4], a scale for each output     (eights there)
//   INT4               [block][group of inputs]: float16 scales [output], then [group / 8][output][4] bytes, low halves
//                      the first four inputs of eight, high halves the others; all zero points are 8
//   FLOAT8, MXFP4      see float8.h
//   INT4_ZEROS         the same with float32 scales [output] and zero points uint8 [output] before the bytes
//   ggml's types       see ggml.h
#pragma once

#include "ggml.h"

namespace weights {

using namespace simd;

enum Kind {
    FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4, FLOAT8 = 10, MXFP4 = 11, INT4_ZEROS = 12,
    Q4_0 = 5, Q8_0 = 6, Q4_K = 7, Q5_K = 8, Q6_K = 9, Q5_0 = 13
};

constexpr int OUTPUTS = VECTORS * LANES;  // of a block
constexpr int INPUT_MULTIPLE = 64;

struct Matrix {
    Kind kind;
    int outputs, inputs;
    int width;  // inputs with padding
    int group;  // INT4, INT4_ZEROS: inputs that share a scale, a multiple of 32; FLOAT8, MXFP4: see float8.h
    const char* data;
    const float* scales;  // INT8: [blocks * OUTPUTS]
    const int32_t* sums;  // INT8: [blocks * OUTPUTS], of each output's weights
    // a matrix of several, one above the other, each but the last of whole blocks: the others' fields say what
    // the first one is
    const Matrix* const* parts = nullptr;
    int num_parts = 0;
    int first_block = 0;  // of a part
};

inline bool is_ggml(Kind kind) { return (kind >= Q4_0 && kind <= Q6_K) || kind == Q5_0; }

// Calls use(T) with T the ggml type of a kind.
template <class Use> inline auto with_type(Kind kind, Use use) {
    switch (kind) {
        case Q4_0: return use(ggml::Q4_0{});
        case Q5_0: return use(ggml::Q5_0{});
        case Q8_0: return use(ggml::Q8_0{});
        case Q4_K: return use(ggml::Q4_K{});
        case Q5_K: return use(ggml::Q5_K{});
        default: return use(ggml::Q6_K{});
    }
}

// The part that has a block, which becomes the block's number in it.
inline const Matrix& part_of(const Matrix& w, int* block) {
    if (!w.parts) return w;
    int i = w.num_parts - 1;
    while (i > 0 && w.parts[i]->first_block > *block) i--;
    *block -= w.parts[i]->first_block;
    return *w.parts[i];
}

inline int num_blocks(const Matrix& w) { return (w.outputs + OUTPUTS - 1) / OUTPUTS; }

inline bool is_int4(Kind kind) { return kind == INT4 || kind == INT4_ZEROS; }
inline bool is_float8(Kind kind) { return kind == FLOAT8 || kind == MXFP4; }

// Inputs are padded to a multiple of it: whole groups.
inline int input_multiple(Kind kind, int group) {
    return (is_int4(kind) || is_float8(kind)) && group > INPUT_MULTIPLE ? group : INPUT_MULTIPLE;
}

inline size_t group_bytes(const Matrix& w) {
    if (w.kind == FLOAT8) return (size_t)OUTPUTS * (4 + w.group);
    if (w.kind == MXFP4) return (size_t)OUTPUTS * (1 + w.group / 2);
    return (size_t)OUTPUTS * ((w.kind == INT4 ? 2 : 5) + w.group / 2);
}

inline size_t block_bytes(const Matrix& w) {
    switch (w.kind) {
        case FLOAT32: return (size_t)OUTPUTS * w.width * 4;
        case INT8: return (size_t)OUTPUTS * w.width;
        case INT4:
        case FLOAT8:
        case MXFP4:
        case INT4_ZEROS: return group_bytes(w) * (w.width / w.group);
        case FLOAT16:
        case BFLOAT16: return (size_t)OUTPUTS * w.width * 2;
        default:
            return with_type(w.kind, [&](auto type) {
                return (size_t)(w.width / (ggml::GROUP * type.GROUPS)) * type.BLOCK_BYTES;
            });
    }
}

inline rows::Form input_form(Kind kind) {
    if (kind == INT8) return rows::INT8;
    if (is_int4(kind)) return rows::GROUPED;
    if (is_ggml(kind)) return rows::HALVED;
    return (kind == BFLOAT16 || is_float8(kind)) && HAS_BF16_DOT ? rows::BFLOAT16 : rows::FLOAT32;
}

// Inputs that lie together for each output.
inline int together(Kind kind) { return kind == BFLOAT16 ? BF16_TOGETHER : kind == INT8 ? INT8_TOGETHER : 1; }

// Sums of int8 products as results, for vector `v` of a block and a row with this scale.
inline Floats scaled(const Matrix& w, int block, int v, Ints sums, float row_scale) {
    size_t at = (size_t)block * OUTPUTS + v * LANES;
    return floats(sums - load<Ints>(w.sums + at) * INPUT_OFFSET) * broadcast(row_scale) * load<Floats>(w.scales + at);
}

// The place of a number within its block, in elements of the kind.
inline size_t place(int together, int in_block, int input) {
    return ((size_t)(input / together) * OUTPUTS + in_block) * together + input % together;
}

// One output of a block from its row of numbers. -> their sum, where they are integers
template <int TOGETHER, class T> inline int32_t pack_row(const T* row, int inputs, int in_block, T* block) {
    int32_t sum = 0;
    T* to = block + in_block * TOGETHER;
    for (int k = 0; k < inputs; k += TOGETHER, to += OUTPUTS * TOGETHER)
        for (int i = 0; i < TOGETHER && k + i < inputs; i++) {
            to[i] = row[k + i];
            if constexpr (sizeof(T) == 1) sum += row[k + i];
        }
    return sum;
}

// Block `block` from weights [outputs, inputs] of the same kind; `source` is the whole matrix. INT8: `sums` is filled.
inline void pack_block(const Matrix& w, const void* source, int block, char* data, int32_t* sums) {
    char* to = data + (size_t)block * block_bytes(w);
    memset(to, 0, block_bytes(w));
    for (int i = 0; i < OUTPUTS && block * OUTPUTS + i < w.outputs; i++) {
        int output = block * OUTPUTS + i;
        size_t from = (size_t)output * w.inputs;
        switch (w.kind) {
            case FLOAT32: pack_row<1>((const float*)source + from, w.inputs, i, (float*)to); break;
            case FLOAT16: pack_row<1>((const uint16_t*)source + from, w.inputs, i, (uint16_t*)to); break;
            case BFLOAT16: pack_row<BF16_TOGETHER>((const uint16_t*)source + from, w.inputs, i, (uint16_t*)to); break;
            default: sums[output] = pack_row<INT8_TOGETHER>((const int8_t*)source + from, w.inputs, i, (int8_t*)to);
        }
    }
}

// The same for 4 bits: codes uint8 [outputs, inputs] below 16, scales float32 (of INT4 numbers that float16 has) and
// zeros uint8 [outputs, groups]; zeros may be null: 8.
inline void pack_int4_block(const Matrix& w, const uint8_t* codes, const float* scales, const uint8_t* zeros, int block,
                            char* data) {
    int given = (w.inputs + w.group - 1) / w.group;
    char* to = data + (size_t)block * block_bytes(w);
    memset(to, 0, block_bytes(w));
    for (int g = 0; g < given; g++, to += group_bytes(w)) {
        auto* bytes = (uint8_t*)to + group_bytes(w) - (size_t)OUTPUTS * w.group / 2;
        float group_scales[OUTPUTS] = {};
        for (int i = 0; i < OUTPUTS; i++) {
            int output = block * OUTPUTS + i;
            if (output >= w.outputs) break;
            uint8_t zero = zeros ? zeros[(size_t)output * given + g] : 8;
            group_scales[i] = scales[(size_t)output * given + g];
            if (w.kind == INT4_ZEROS) bytes[i - OUTPUTS] = zero;
            for (int k = 0; k < w.group; k++) {
                int input = g * w.group + k;
                uint8_t code = input < w.inputs ? codes[(size_t)output * w.inputs + input] : zero;
                bytes[((size_t)(k / 8) * OUTPUTS + i) * 4 + k % 4] |= code << (k % 8 / 4 * 4);
            }
        }
        if (w.kind == INT4_ZEROS) memcpy(to, group_scales, sizeof group_scales);
        else
            for (int v = 0; v < VECTORS; v++)
                store_f16((uint16_t*)to + v * LANES, load<Floats>(group_scales + v * LANES));
    }
}

// The same for ggml's types: row i of the matrix lies at rows + order[i] * stride, as a file has it.
inline void pack_ggml_block(const Matrix& w, const uint8_t* rows, int64_t stride, const int64_t* order, int block, char* data) {
    char* to = data + (size_t)block * block_bytes(w);
    memset(to, 0, block_bytes(w));
    with_type(w.kind, [&](auto type) {
        int blocks = w.inputs / (ggml::GROUP * type.GROUPS);
        for (int i = 0; i < OUTPUTS && block * OUTPUTS + i < w.outputs; i++)
            ggml::pack_output<decltype(type)>(rows + order[block * OUTPUTS + i] * stride, blocks, i, to);
    });
}

// Row `output` of the matrix as float32 [inputs]. Those of 4 bits and of 8-bit floats have no use for it.
inline void unpack_row(const Matrix& w, int output, float* out) {
    const char* from = w.data + (size_t)(output / OUTPUTS) * block_bytes(w);
    if (is_ggml(w.kind))
        return with_type(w.kind, [&](auto type) {
            ggml::unpack_output<decltype(type)>(from, w.inputs / (ggml::GROUP * type.GROUPS), output % OUTPUTS, out);
        });
    for (int k = 0, beside = together(w.kind); k < w.inputs; k++) {
        size_t at = place(beside, output % OUTPUTS, k);
        switch (w.kind) {
            case FLOAT32: out[k] = ((const float*)from)[at]; break;
            case BFLOAT16: out[k] = from_bf16(((const uint16_t*)from)[at]); break;
            case FLOAT16: {
                uint16_t lanes[LANES] = {((const uint16_t*)from)[at]};
                out[k] = load_f16(lanes)[0];
                break;
            }
            default: out[k] = ((const int8_t*)from)[at] * w.scales[output];
        }
    }
}

}  // namespace weights
