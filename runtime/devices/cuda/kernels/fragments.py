"""Weights of four bits in an order that is made for the tensor cores, and their products.

A product is computed as outputs by rows: weights are the left operand, which the tensor cores take from
registers, so a number goes from the bytes that were read to a register of the product without a detour, and
a product of few rows wastes nothing on rows that are not there. Inputs are taken BLOCK at a time, in four
*parts* of PART inputs. A word of 32 bits has eight codes: of each part two that are side by side, one in each
half of the word, so that a shift and a mask leave two numbers of 16 bits where the product wants them. The
words of an output are ordered such that the eight numbers of a part which a thread holds of it (of inputs t,
t + 1, t + 8, t + 9, t + 16 ..., t even and below 8) are in four words in a row: it reads them, and those of
the other parts, by one load of 16 bytes.

Codes are made floats by their bits. An unsigned code becomes the mantissa of 128 + code (1024 + code in
float16), from which 128 + zero point is subtracted, exactly; then it is multiplied by its scale, and rounded
to the dtype of the activations. A number of MXFP4 has the bits of its sign, exponent and mantissa put where
bfloat16 has them, and is then 2 ** 126 times too small; this factor is in its scale, and all is exact.

    fragments4  a word for each group and output: its scale in float32, with the zero point in the last bits
    mxfp4       a word for each block and output: a byte for each part, its scale's exponent and 126
"""

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)  # inputs at a time
PART: tl.constexpr = tl.constexpr(32)  # inputs of a part
WORDS: tl.constexpr = tl.constexpr(16)  # of a block of an output
AND_OR: tl.constexpr = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0xEA;")  # (a & b) | c of words
# (a + b) * c of pairs of bfloat16, by instructions that every GPU from sm_80 on has
ADD_MULTIPLY: tl.constexpr = tl.constexpr("""{
    .reg .b32 one, nothing, sum;
    mov.b32 one, 0x3f803f80;
    mov.b32 nothing, 0x80008000;
    fma.rn.bf16x2 sum, $1, one, $2;
    fma.rn.bf16x2 $0, sum, $3, nothing;
}""")
ZERO_BITS: tl.constexpr = tl.constexpr(31)  # of a word of fragments4, those that are its zero point


@triton.jit
def _halves(bits: tl.tensor, KIND: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Words [N, PART / 2], each of two floats in 16 bits -> [N, PART]: of bfloat16 or float16, or float32
    where products are not of what they have."""
    HALF: tl.constexpr = tl.float16 if DOT == tl.float16 and KIND != "mxfp4" else tl.bfloat16
    if DOT == HALF:
        low = (bits & 0xFFFF).to(tl.uint16).to(HALF, bitcast=True)
        high = (bits >> 16).to(tl.uint16).to(HALF, bitcast=True)
    else:  # a bfloat16 is the upper half of a float32
        low = (bits << 16).to(tl.float32, bitcast=True)
        high = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (bits.shape[0], PART))


@triton.jit
def _unsigned(words: tl.tensor, scale: tl.tensor, part: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Codes of a part minus the zero points of their outputs, times their scales, [N, PART]."""
    HALF: tl.constexpr = tl.float16 if DOT == tl.float16 else tl.bfloat16
    ONES: tl.constexpr = 0x64006400 if DOT == tl.float16 else 0x43004300
    bits = words >> (4 * part)
    if DOT == tl.bfloat16:
        operands = bits, tl.full(bits.shape, 0x000F000F, tl.uint32), tl.full(bits.shape, ONES, tl.uint32)
        bits = tl.inline_asm_elementwise(AND_OR, "=r,r,r,r", operands, tl.uint32, is_pure=True, pack=1)
    else:
        bits = (bits & 0x000F000F) | ONES
    numbers = _halves(bits, "fragments4", DOT)
    zeros = ((scale & ZERO_BITS) | (ONES & 0xFFFF)).to(tl.uint16).to(HALF, bitcast=True)
    factor = (scale & 0xFFFFFFE0).to(tl.float32, bitcast=True)
    if DOT == tl.bfloat16:  # two at a time, which the compiler does not find
        operands = numbers, -zeros[:, None], factor.to(DOT)[:, None]
        pairs = tl.inline_asm_elementwise(
            ADD_MULTIPLY, "=r,r,r,r", operands, tl.bfloat16, is_pure=True, pack=2
        )
        return pairs
    else:
        return (numbers - zeros.to(DOT)[:, None]) * factor.to(DOT)[:, None]


@triton.jit
def _microscaled(words: tl.tensor, exponents: tl.tensor, part: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Numbers of MXFP4 of a part times their scales, [N, PART]."""
    MASK: tl.constexpr = 0x81C081C0
    if part < 3:
        bits = (words << (3 * part)) & MASK
    else:
        bits = ((words << 1) & 0x80008000) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)
    numbers = _halves(bits, "mxfp4", DOT)
    scale = (((exponents >> (8 * part)) & 0xFF) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return (numbers * scale.to(numbers.dtype)[:, None]).to(DOT)


@triton.jit
def _load_words(at: tl.tensor, is_out: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Words [N, WORDS] of a block in the order of its inputs: words t, t + 4, t + 8, t + 12 of the eight
    inputs that a thread holds of a part are side by side in memory."""
    words = tl.load(at[:, None] + tl.arange(0, WORDS)[None, :], mask=is_out[:, None], other=0)
    words = tl.permute(tl.reshape(words, (N, 4, 4)), (0, 2, 1))
    return tl.reshape(words, (N, WORDS)).to(tl.uint32, bitcast=True)


@triton.jit
def _numbers(
    words: tl.tensor, scale: tl.tensor, part: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr
) -> tl.tensor:
    """The weights of a part, [N, PART]. `scale`: the words of their group or block."""
    if KIND == "mxfp4":
        return _microscaled(words, scale, part, DOT)
    else:
        return _unsigned(words, scale, part, DOT)


@triton.jit
def sum_fragments(
    x: tl.tensor,
    weights: tl.tuple,
    gated_weights: tl.tuple,
    is_row: tl.tensor,
    is_out: tl.tensor,
    ins: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    GATED: tl.constexpr,
    F: tl.constexpr,
) -> tuple:
    """Sums float32 [M, N] over blocks [begin, end) of the inputs: of the outputs, and of what they gate.
    x [M]: where rows begin; `weights` and `gated_weights`, and F: Weights and Format of gemm.py. Scales of a
    group, or of a block in MXFP4, are `rows` behind those of the one before it."""
    # parts that share a word
    LENGTH: tl.constexpr = 4 if F.KIND == "mxfp4" or F.GROUP == 0 or F.GROUP >= 128 else F.GROUP // 32
    acc = tl.zeros((F.N, F.M), tl.float32)
    gated = tl.zeros((F.N, F.M), tl.float32) if GATED else acc
    for block in tl.range(begin, end):
        w = _load_words(weights.at + block * WORDS, is_out, F.N)
        gated_w = _load_words(gated_weights.at + block * WORDS, is_out, F.N) if GATED else w
        for part in tl.static_range(4):
            first = block * BLOCK + part * PART
            if part % LENGTH == 0:
                group = block if F.KIND == "mxfp4" else first // F.GROUP if F.GROUP > 0 else 0
                scale_at = weights.scales + group * rows
                scale = tl.load(scale_at, mask=is_out, other=0).to(tl.uint32, bitcast=True)
                gated_scale = scale
                if GATED:
                    gated_scale = tl.load(gated_weights.scales + group * rows, mask=is_out, other=0)
                    gated_scale = gated_scale.to(tl.uint32, bitcast=True)
            columns = first + tl.arange(0, PART)
            mask = is_row[:, None] if F.EVEN else is_row[:, None] & (columns < ins)[None, :]
            a = tl.trans(tl.load(x[:, None] + columns[None, :], mask=mask, other=0.0).to(F.DOT))
            acc = tl.dot(_numbers(w, scale, part, F.KIND, F.DOT), a, acc, input_precision="tf32x3")
            if GATED:
                numbers = _numbers(gated_w, gated_scale, part, F.KIND, F.DOT)
                gated = tl.dot(numbers, a, gated, input_precision="tf32x3")
    return tl.trans(acc), tl.trans(gated)
