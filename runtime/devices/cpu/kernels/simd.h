// Vectors of one register, and the few operations on them that the compiler's vector types lack.
//
// Arithmetic is written on the vector types of GCC and Clang (a * b + c becomes a fused multiply-add). What differs
// between instruction sets is below: a dot product of bytes, one of bfloat16 pairs, float16, and shuffles. The file is
// compiled once for each level of levels.py; which one runs is chosen by the CPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace simd {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // float32 in a vector
constexpr int VECTORS = 2;  // vectors of outputs in a block of packed weights
constexpr int ROWS = 12;  // rows of inputs that a product holds in registers
constexpr int BYTE_ROWS = 12;    // the same, of products of bytes and of 8-bit floats
constexpr int GROUPED_ROWS = 6;  // the same, where each group of inputs has a scale
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int VECTORS = 4;
constexpr int ROWS = 6;
constexpr int BYTE_ROWS = 6;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int GROUPED_ROWS = 4;
#else
constexpr int GROUPED_ROWS = 2;
#endif
#else
constexpr int LANES = 8;
constexpr int VECTORS = 2;
constexpr int ROWS = 6;
constexpr int BYTE_ROWS = 4;
constexpr int GROUPED_ROWS = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

template <class T> inline T load(const void* at) {
    T value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
}

template <class T> inline void store(void* at, T value) { __builtin_memcpy(at, &value, sizeof value); }

inline Floats broadcast(float x) { return x - Floats{}; }
inline Ints broadcast(int32_t x) { return x - Ints{}; }
inline Words broadcast(uint32_t x) { return x - Words{}; }

inline Floats floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

inline float largest(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__aarch64__)
    return vmaxnmvq_f32((float32x4_t)x);
#else
    __m256 all = (__m256)x;
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#endif
}

inline int32_t sum(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__aarch64__)
    return vaddvq_s32((int32x4_t)x);
#else
    __m256i all = (__m256i)x;
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(four) + _mm_extract_epi32(four, 1);
#endif
}

// Whether some lane of a mask, of 0 and -1, is set.
inline bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    int some = 0;
    for (int i = 0; i < LANES; i++) some |= mask[i];
    return some != 0;
#endif
}

inline float sum(Floats x) {  // in a fixed order: pairs of halves
    float parts[LANES];
    store(parts, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

// ---- bfloat16

inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t to_bf16(float x) {  // rounds to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);  // NaN stays NaN
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Floats low_bf16(Words pairs) { return (Floats)(pairs << 16); }
inline Floats high_bf16(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

inline Floats load_bf16(const uint16_t* at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16);
#elif defined(__aarch64__)
    return (Floats)vshll_n_u16(vld1_u16(at), 16);
#else
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = from_bf16(at[i]);
    return out;
#endif
}

inline void store_bf16(uint16_t* at, Floats x) {
    Words bits = (Words)x;
    Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    Words nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
    rounded = (nan & (bits >> 16 | 0x40u)) | (~nan & rounded);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16((__m512i)rounded));
#elif defined(__aarch64__)
    vst1_u16(at, vmovn_u32((uint32x4_t)rounded));
#else
    for (int i = 0; i < LANES; i++) at[i] = (uint16_t)rounded[i];
#endif
}

// The same for numbers that dot_bf16 multiplies, which takes subnormal ones for zero where it is an instruction.
inline void store_bf16_input(uint16_t* at, Floats x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store_bf16(at, x);
#endif
}

// Whether there are products of two rows with two outputs (pairs.h), and how many inputs of an output lie together in
// packed weights: eight bytes for them, else what a dot product takes.
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool HAS_PAIRS = true;
constexpr int BF16_TOGETHER = 4, INT8_TOGETHER = 8;
#else
constexpr bool HAS_PAIRS = false;
constexpr int BF16_TOGETHER = 2, INT8_TOGETHER = 4;
#endif

// Whether there are products of tiles (amx.h).
#if defined(__AMX_TILE__) || defined(AMX_DOUBLE)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

// Whether pairs of bfloat16 are multiplied as they are; else inputs stay float32.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(AMX_DOUBLE)
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif

// total + x0 * w0 + x1 * w1 for each lane's pair
inline Floats dot_bf16(Floats total, Words inputs, Words weights) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)inputs, (__m512bh)weights);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Floats)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)inputs, (bfloat16x8_t)weights);
#else
    return total + low_bf16(inputs) * low_bf16(weights) + high_bf16(inputs) * high_bf16(weights);
#endif
}

// ---- float16

inline Floats load_f16(const uint16_t* at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#endif
}

inline void store_f16(uint16_t* at, Floats x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#endif
}

// ---- floats of 8 and 4 bits

// bfloat16 pairs of numbers that bfloat16 has.
inline Words join_bf16(Floats first, Floats second) { return (Words)first >> 16 | ((Words)second & 0xffff0000u); }

// How many inputs of an output lie together in packed 8-bit floats: pairs for dot products, else one, whose outputs
// follow one another.
constexpr int FLOAT8_TOGETHER = HAS_BF16_DOT ? 2 : 1;

// LANES numbers of 8 bits (e4m3 without infinities; not NaN), divided by 2^8: the float16 with the same bits behind the
// sign. Conversion of float16 is exact for subnormal numbers too, and takes no longer for them.
inline Floats load_float8(const char* at) {
    constexpr int16_t KEPT = (int16_t)0xbf80;  // the sign, and what is not the sign's copy
#if defined(__AVX512F__)
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at)), 7);
    return (Floats)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(KEPT)));
#elif defined(__AVX2__)
    __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)at)), 7);
    return (Floats)_mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(KEPT)));
#else
    int16x4_t halves = vshl_n_s16(vget_low_s16(vmovl_s8(vcreate_s8(load<uint32_t>(at)))), 7);
    return vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(halves, vdup_n_s16(KEPT))));
#endif
}

#if defined(__AVX512BF16__)
// LANES pairs of numbers of 8 bits as pairs of bfloat16. Their dot product takes subnormal numbers for zero, so none may
// be made on the way.
inline Words load_float8_pairs(const char* at) {
    const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)at));
    __m512i moved = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi16((short)0x87f0));
    __m512i pairs = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
    __mmask32 is_small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    pairs = _mm512_mask_permutexvar_epi16(pairs, is_small, codes, small);
    return (Words)_mm512_ternarylogic_epi32(pairs, codes, _mm512_set1_epi16((short)0x8000), 0xf8);  // pairs | codes & sign
}
#else
// Numbers of 8 bits at the top of each lane, whatever is below. Their exponent moves to its place as it is, and is right
// after a product with 2^120.
inline Floats top_float8(Words words) {
    return (Floats)((Words)((Ints)words >> 4) & 0x87f00000u) * 0x1p120f;
}

inline Words load_float8_pairs(const char* at) {
    Words words = (Words)load_bf16((const uint16_t*)at);  // a pair is in the upper half of its lane
    return join_bf16(top_float8(words << 8), top_float8(words));
}
#endif

// Numbers of 4 bits (e2m1) at the bottom of each lane, whatever is above.
inline Floats bottom_float4(Words codes) {
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, numbers);
#elif defined(__AVX2__)
    const __m256 numbers = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    return (Floats)((Words)_mm256_permutevar8x32_ps(numbers, (__m256i)codes) | (codes << 28 & 0x80000000u));
#else
    const uint8_t upper[16] = {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const uint8_t lower[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    auto top = vqtbl1q_u8(vld1q_u8(upper), (uint8x16_t)(codes << 24 & 0x0f000000u));
    auto next = vqtbl1q_u8(vld1q_u8(lower), (uint8x16_t)(codes << 16 & 0x000f0000u));
    return (Floats)((Words)top | (Words)next);
#endif
}

// The same, and those at the bottom of the upper half of each lane, as pairs of bfloat16.
inline Words float4_pairs(Words codes) {
#if defined(__AVX512BF16__)
    // Each number twice: the fifth bit of an index is not the code's.
    const __m256i numbers = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000,
                                              (short)0xbf00, (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040,
                                              (short)0xc080, (short)0xc0c0);
    return (Words)_mm512_permutexvar_epi16((__m512i)codes, _mm512_broadcast_i64x4(numbers));
#else
    return join_bf16(bottom_float4(codes), bottom_float4(codes >> 16));
#endif
}

// ---- bytes

// Added to int8 inputs before they meet int8 weights; the sum of the weights takes it out again. x86 multiplies
// unsigned by signed bytes.
#if defined(__AVX512VNNI__)
constexpr int INPUT_OFFSET = 128;
#else
constexpr int INPUT_OFFSET = 0;
#endif

// total + the dot product of four unsigned bytes (below 128 without VNNI) with four signed ones, for each lane
inline Ints dot_unsigned(Ints total, Words bytes, Words signed_bytes) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)bytes, (__m512i)signed_bytes);
#elif defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16((__m256i)bytes, (__m256i)signed_bytes);
    return total + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)total, (int8x16_t)bytes, (int8x16_t)signed_bytes);
#else
    auto a = (int8x16_t)bytes, b = (int8x16_t)signed_bytes;
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))), high = vpaddlq_s16(vmull_high_s8(a, b));
    return total + (Ints)vpaddq_s32(low, high);
#endif
}

// Sums of products of codes (unsigned bytes) with inputs from -127 to 127, on the way to sums of 32 bits. AVX2 adds pairs
// of products in 16 bits, which hold those of a few words: a widening for each word would cost as much as the products.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef int16_t Partial __attribute__((vector_size(LANES * 4)));

// Words of codes up to `most` whose products one partial sum holds.
constexpr int words_of_partial(int most) { return 32767 / (2 * 127 * most); }

inline Partial begin_partial(Ints) { return Partial{}; }

inline Partial add_partial(Partial sum, Words codes, Words inputs) {
    sum += (Partial)_mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs);
    asm("" : "+x"(sum));  // keeps the order of sums, which compilers else turn into a tree of more registers than there are
    return sum;
}

inline Ints end_partial(Ints total, Partial sum) {
    return total + (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}
#else
typedef Ints Partial;
constexpr int words_of_partial(int) { return 1 << 16; }
inline Partial begin_partial(Ints total) { return total; }
inline Partial add_partial(Partial sum, Words codes, Words inputs) { return dot_unsigned(sum, codes, inputs); }
inline Ints end_partial(Ints, Partial sum) { return sum; }
#endif

// The same of inputs (int8, INPUT_OFFSET added) with int8 weights.
inline Ints dot_int8(Ints total, Words inputs, Words weights) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    __m256i x = (__m256i)inputs;  // |x| <= 127, so that the pairs' sums fit int16
    return dot_unsigned(total, (Words)_mm256_abs_epi8(x), (Words)_mm256_sign_epi8((__m256i)weights, x));
#else
    return dot_unsigned(total, inputs, weights);
#endif
}

// Added to int8 weights, by turning their upper bit, before they meet int8 inputs; the sum of the inputs takes it out.
#if defined(__AVX512VNNI__)
constexpr int WEIGHT_OFFSET = 128;
#else
constexpr int WEIGHT_OFFSET = 0;
#endif

// total + the dot product of four int8 weights (WEIGHT_OFFSET added) with inputs from -127 to 127, for each lane
inline Ints dot_signed(Ints total, Words weights, Words inputs) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    __m256i w = (__m256i)weights;  // |w| <= 128, so that the pairs' sums fit int16
    return dot_unsigned(total, (Words)_mm256_abs_epi8(w), (Words)_mm256_sign_epi8((__m256i)inputs, w));
#else
    return dot_unsigned(total, weights, inputs);
#endif
}

// Rounds to nearest, ties to even. |x| < 2^22
inline Ints rounded(Floats x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

inline void store_bytes(int8_t* at, Ints x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__aarch64__)
    int8x16_t all = (int8x16_t)x;
    store(at, (uint32_t)vgetq_lane_u32((uint32x4_t)vuzp1q_s8(vuzp1q_s8(all, all), vuzp1q_s8(all, all)), 0));
#else
    for (int i = 0; i < LANES; i++) at[i] = (int8_t)x[i];
#endif
}

// Products of `a`, from 0 to 32767, with `b`, which 16 bits hold: in one step where products of 32 bits take two.
inline Ints multiply_small(Ints a, Ints b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return a * b;
#endif
}

// LANES bytes without a sign
inline Ints load_bytes(const uint8_t* at) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
#else
    auto words = vmovl_u8((uint8x8_t)vdup_n_u32(load<uint32_t>(at)));
    return (Ints)vmovl_u16(vget_low_u16(words));
#endif
}

// The same with a sign
inline Ints load_signed_bytes(const char* at) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
#else
    auto words = vmovl_s8((int8x8_t)vdup_n_u32(load<uint32_t>(at)));
    return (Ints)vmovl_s16(vget_low_s16(words));
#endif
}

// ---- order

// Lanes of a and b in the order of INDICES, which count on from a to b.
template <int... INDICES> inline Floats pick(Floats a, Floats b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, INDICES...);
#else
    return __builtin_shuffle(a, b, Ints{INDICES...});
#endif
}

// Swaps blocks of DISTANCE lanes between vectors that lie DISTANCE apart, then those of twice the distance, ...
template <int DISTANCE, int... I> inline void exchange(Floats* rows, std::integer_sequence<int, I...> lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & DISTANCE)) {
            Floats a = rows[i], b = rows[i + DISTANCE];
            rows[i] = pick<((I & DISTANCE) ? LANES + I - DISTANCE : I)...>(a, b);
            rows[i + DISTANCE] = pick<((I & DISTANCE) ? LANES + I : I + DISTANCE)...>(a, b);
        }
    if constexpr (DISTANCE * 2 < LANES) exchange<DISTANCE * 2>(rows, lanes);
}

// A square of LANES vectors, turned in place: lane j of vector i and lane i of vector j change places.
inline void transpose(Floats* rows) { exchange<1>(rows, std::make_integer_sequence<int, LANES>()); }

}  // namespace simd
