"""Activations as the products of a scheme take them: of 8 bits with a scale for each row, or each row and
group; or in another order.

A row of x becomes one or, where experts differ in how they want it, one for each slot that it has. Codes of
int8 come out of a float32 sum: beside 1.5 * 2**23 a number has only the bits of its integer, rounded to the
nearest, ties to even.
"""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.fp8_bytes import narrow

TINY: tl.constexpr = tl.constexpr(1e-12)
INTEGERS: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def _code(x: tl.tensor, scale: tl.tensor, offset: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    if KIND == "fp8":
        return narrow(tl.div_rn(x, scale), "e4m3")
    else:
        value = tl.minimum(tl.maximum(tl.div_rn(x, scale) + offset, -128.0), 127.0)
        return ((value + INTEGERS).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def _read(
    x: tl.tensor, order: tl.tensor, at: tl.tensor, size: tl.tensor, padded: tl.tensor, ORDERED: tl.constexpr
) -> tl.tensor:
    """Columns `at` of a row, where `order` says which one each is; -1 and what is beyond are zeros."""
    if ORDERED:
        column = tl.load(order + at, mask=at < padded, other=-1)
        return tl.load(x + column, mask=column >= 0, other=0.0)
    else:
        return tl.load(x + at, mask=at < size, other=0.0)


@triton.jit
def by_row(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    given: tl.tensor,
    offsets: tl.tensor,
    size: tl.tensor,
    padded: tl.tensor,
    stride: tl.tensor,
    experts: tl.tensor,
    KIND: tl.constexpr,
    REPEAT: tl.constexpr,
    ROUTED: tl.constexpr,
    ORDERED: tl.constexpr,
    GIVEN: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows of out,): out [rows, padded] of x [rows / REPEAT, size]; KIND fp8, int8, or "" for a
    copy."""
    row = tl.program_id(0).to(tl.int64)
    expert = row * 0
    if ROUTED:
        expert = tl.load(ids + row).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        line, turn, columns = x + row // REPEAT * stride, order + expert * padded, tl.arange(0, BLOCK)
        if KIND == "":
            for at in range(0, padded, BLOCK):
                found = _read(line, turn, at + columns, size, padded, ORDERED)
                tl.store(out + row * padded + at + columns, found, mask=at + columns < padded)
        else:
            offset = tl.load(offsets + expert) if SHIFTED else 0.0
            if GIVEN:
                scale = tl.load(given + expert)
            else:
                top = tl.zeros((BLOCK,), tl.float32)
                for at in range(0, size, BLOCK):
                    found = tl.load(line + at + columns, mask=at + columns < size, other=0.0).to(tl.float32)
                    top = tl.maximum(top, tl.abs(found))
                MOST: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
                scale = tl.maximum(tl.div_rn(tl.max(top, 0), MOST), TINY)
            tl.store(scales + row, scale)
            for at in range(0, padded, BLOCK):
                found = _read(line, turn, at + columns, size, padded, ORDERED).to(tl.float32)
                tl.store(
                    out + row * padded + at + columns,
                    _code(found, scale, offset, KIND),
                    mask=at + columns < padded,
                )


@triton.jit
def by_group(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    groups: tl.tensor,
    experts: tl.tensor,
    ROUTED: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, pieces of GROUPS groups): 8-bit floats [rows, groups * WIDTH], zeros filling up each group,
    and scales [rows, groups]."""
    row = tl.program_id(0).to(tl.int64)
    expert = row * 0
    if ROUTED:
        expert = tl.load(ids + row).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        group, member = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, BLOCK)
        at = group[:, None] * GROUP + member[None, :]
        found = tl.load(x + row * stride + at, mask=(at < size) & (member < GROUP)[None, :], other=0.0).to(
            tl.float32
        )
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(found), 1), 448.0), TINY)
        places = out + row * (groups * WIDTH) + group[:, None] * WIDTH + member[None, :]
        is_there = (group < groups)[:, None] & (member < WIDTH)[None, :]
        tl.store(places, _code(found, scale[:, None], 0.0, "fp8"), mask=is_there)
        tl.store(scales + row * groups + group, scale, mask=group < groups)
