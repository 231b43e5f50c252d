"""Conversion of 8-bit floats from and to bytes: keys and values of --kv-cache-dtype fp8_*.

Writing works on bits, so that the result is the same on every GPU: the interpreter rounds differently.
Reading is exact either way. On GPUs before sm_89 it costs three integer operations and a multiplication, next
to a load from memory; from sm_89 on the hardware converts e4m3 (`native`). Numbers beyond the range become
the largest number. NaN is stored as NaN; on bits NaN of e4m3 is read as 480, so that reading has no branch.
"""

import triton
import triton.language as tl


@triton.jit
def from_fp8(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """uint8 -> float16, exactly. Both are a float16 with fewer bits: e5m2 its upper half, e4m3 one with
    another bias. KIND: e4m3, e5m2, or native for e4m3 on GPUs whose tensor cores know it."""
    wide = x.to(tl.uint16)
    if KIND == "native":
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if KIND == "e5m2":
        return (wide << 8).to(tl.float16, bitcast=True)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def to_fp8(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """float32 -> uint8, to the nearest, ties to even. Below the smallest normal number the spacing is fixed:
    adding a number with that spacing rounds, and leaves the code in the last bits."""
    if KIND == "e4m3":
        MOST: tl.constexpr = 448.0
        SHIFT: tl.constexpr = 20
        BIAS: tl.constexpr = (127 - 7) << 3
        NORMAL: tl.constexpr = 0.015625
        UNIT: tl.constexpr = 16384.0
        NAN: tl.constexpr = 0x7F
    else:
        MOST: tl.constexpr = 57344.0
        SHIFT: tl.constexpr = 21
        BIAS: tl.constexpr = (127 - 15) << 2
        NORMAL: tl.constexpr = 0.00006103515625
        UNIT: tl.constexpr = 128.0
        NAN: tl.constexpr = 0x7F
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), MOST)
    bits = size.to(tl.int32, bitcast=True)
    rounded = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - BIAS
    small = (size + UNIT).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < NORMAL, small, rounded)
    return (tl.where(x == x, code, NAN) | sign).to(tl.uint8)
