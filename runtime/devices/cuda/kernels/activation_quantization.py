"""Quantization of activations to 8 bits, with a scale for each row or for each row and group, and reordering
of their columns.

The kernels of norms and of gates quantize what they make at once (`quantize_held`), and products of few rows
what they read (`quantize_part`), with the same results. A row of x becomes one row or, where experts want it
differently, one for each of its MoE slots. Int8 values are rounded by adding 1.5 * 2**23: the sum's low bits
are the integer, rounded to the nearest, ties to even.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.fp8_bytes import to_fp8

TINY: tl.constexpr = tl.constexpr(1e-12)
ROUND_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
# rows that the programs of a product quantize at most, each of them all, and how many columns at a time
PART_ROWS: tl.constexpr = tl.constexpr(4)
PART_BLOCK: tl.constexpr = tl.constexpr(1024)


class RowCodes(NamedTuple):
    """Rows in 8 bits: where a kernel that makes rows writes them as a product takes them."""

    codes: Tensor  # uint8 [rows, size]
    scales: Tensor  # float32 [rows, groups or 1]
    kind: str  # fp8 or int8
    group: int  # columns that share a scale, a power of two; 0: all


@triton.jit
def _quantize(x: tl.tensor, scale: tl.tensor, offset: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Bytes of fp8 (e4m3) or int8 values."""
    if KIND == "fp8":
        return to_fp8(tl.div_rn(x, scale), "e4m3")
    else:
        value = tl.minimum(tl.maximum(tl.div_rn(x, scale) + offset, -128.0), 127.0)
        return ((value + ROUND_MAGIC).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def quantize_part(
    x: tl.tensor,
    stride: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    begin: tl.tensor,
    num_blocks: tl.tensor,
    F: tl.constexpr,
) -> None:
    """Quantizes `count` rows x [count, size], at most PART_ROWS, as a product's Format says: with a scale for
    each whole row, scales [count], and codes [count, size] in the columns of `num_blocks` blocks from `begin`
    on. This program may read both when it returns; others write the same."""
    rows, columns = tl.arange(0, PART_ROWS), tl.arange(0, PART_BLOCK)
    is_row, at = (rows < count)[:, None], x + rows[:, None] * stride
    most = tl.zeros((PART_ROWS, PART_BLOCK), tl.float32)
    for first in tl.range(0, size, PART_BLOCK):
        column = first + columns[None, :]
        values = tl.load(at + column, mask=is_row & (column < size), other=0.0)
        most = tl.maximum(most, tl.abs(values.to(tl.float32)))
    MOST: tl.constexpr = 448.0 if F.INPUTS == "fp8" else 127.0
    scale = tl.maximum(tl.div_rn(tl.max(most, 1), MOST), TINY)
    tl.store(scales + rows, scale, mask=rows < count)
    K: tl.constexpr = 2 * F.K if F.KIND == "codes4" else F.K
    end = tl.minimum((begin + num_blocks) * K, size)
    for first in tl.range(begin * K, end, PART_BLOCK):
        column = first + columns[None, :]
        mask = is_row & (column < end)
        values = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
        target = codes + rows[:, None] * size + column
        tl.store(target, _quantize(values, scale[:, None], 0.0, F.INPUTS), mask=mask)
    tl.debug_barrier()


@triton.jit
def quantize_held(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantizes what a program holds of a row, float32 [BLOCK], zeros beyond `size`: columns from `first` on,
    which begins a group. `codes`: bytes of the row, `scales`: its scales; GROUP 0: one scale for the whole
    row, else a power of two."""
    at = tl.arange(0, BLOCK)
    MOST: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
    if GROUP == 0:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), MOST), TINY)
        tl.store(scales, scale)
        tl.store(codes + first + at, _quantize(x, scale, 0.0, KIND), mask=first + at < size)
    else:
        parts = tl.reshape(x, (BLOCK // GROUP, GROUP))
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(parts), 1), MOST), TINY)
        groups, inside = tl.arange(0, BLOCK // GROUP), tl.arange(0, GROUP)
        column = first + groups[:, None] * GROUP + inside[None, :]
        tl.store(scales + first // GROUP + groups, scale, mask=first + groups * GROUP < size)
        tl.store(codes + column, _quantize(parts, scale[:, None], 0.0, KIND), mask=column < size)


@triton.jit
def _load_columns(
    x: tl.tensor, order: tl.tensor, at: tl.tensor, size: tl.tensor, padded: tl.tensor, ORDERED: tl.constexpr
) -> tl.tensor:
    """Columns `at` of a row; ORDERED: column order[at]. Columns beyond the row and those of order -1 are
    0."""
    if ORDERED:
        column = tl.load(order + at, mask=at < padded, other=-1)
        return tl.load(x + column, mask=column >= 0, other=0.0)
    else:
        return tl.load(x + at, mask=at < size, other=0.0)


@triton.jit
def quantize_rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    input_scales: tl.tensor,
    offsets: tl.tensor,
    size: tl.tensor,
    padded: tl.tensor,
    stride: tl.tensor,
    experts: tl.tensor,
    KIND: tl.constexpr,
    REPEAT: tl.constexpr,
    ROUTED: tl.constexpr,
    ORDERED: tl.constexpr,
    STATIC: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows of out,): out [rows, padded] of x [rows / REPEAT, size]; KIND fp8, int8, or "" for a copy.
    Rows of slots whose expert is on another rank are skipped."""
    row = tl.program_id(0).to(tl.int64)
    expert = row * 0
    if ROUTED:
        expert = tl.load(ids + row).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        source, columns_at, columns = x + row // REPEAT * stride, order + expert * padded, tl.arange(0, BLOCK)
        if KIND == "":
            for at in range(0, padded, BLOCK):
                values = _load_columns(source, columns_at, at + columns, size, padded, ORDERED)
                tl.store(out + row * padded + at + columns, values, mask=at + columns < padded)
        else:
            offset = tl.load(offsets + expert) if SHIFTED else 0.0
            if STATIC:
                scale = tl.load(input_scales + expert)
            else:
                abs_max = tl.zeros((BLOCK,), tl.float32)
                for at in range(0, size, BLOCK):
                    values = tl.load(source + at + columns, mask=at + columns < size, other=0.0).to(
                        tl.float32
                    )
                    abs_max = tl.maximum(abs_max, tl.abs(values))
                MOST: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
                scale = tl.maximum(tl.div_rn(tl.max(abs_max, 0), MOST), TINY)
            tl.store(scales + row, scale)
            for at in range(0, padded, BLOCK):
                values = _load_columns(source, columns_at, at + columns, size, padded, ORDERED).to(tl.float32)
                tl.store(
                    out + row * padded + at + columns,
                    _quantize(values, scale, offset, KIND),
                    mask=at + columns < padded,
                )


@triton.jit
def quantize_groups_kernel(
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
    """Grid (rows, blocks of GROUPS groups): 8-bit floats [rows, groups * WIDTH], each group padded with
    zeros, and scales [rows, groups]."""
    row = tl.program_id(0).to(tl.int64)
    expert = row * 0
    if ROUTED:
        expert = tl.load(ids + row).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        group, member = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, BLOCK)
        at = group[:, None] * GROUP + member[None, :]
        values = tl.load(x + row * stride + at, mask=(at < size) & (member < GROUP)[None, :], other=0.0).to(
            tl.float32
        )
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 1), 448.0), TINY)
        targets = out + row * (groups * WIDTH) + group[:, None] * WIDTH + member[None, :]
        is_there = (group < groups)[:, None] & (member < WIDTH)[None, :]
        tl.store(targets, _quantize(values, scale[:, None], 0.0, "fp8"), mask=is_there)
        tl.store(scales + row * groups + group, scale, mask=group < groups)
