"""What products do with their sums: corrections, biases and gates, and sums of parts."""

from typing import NamedTuple

import triton
import triton.language as tl

ALPHA: tl.constexpr = tl.constexpr(1.702)  # of gpt-oss's gate: the gain of its sigmoid
LIMIT: tl.constexpr = tl.constexpr(7.0)  # what its halves are clamped to


class Epilogue(NamedTuple):
    """Which corrections the sums get before they are stored."""

    FACTORED: tl.constexpr  # a factor for each row
    SCALED: tl.constexpr  # a scale for each output
    HAS_SUMS: tl.constexpr  # an int32 addend for each output
    HAS_BIAS: tl.constexpr


@triton.jit
def _finish(
    acc: tl.tensor,
    factor: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    is_out: tl.tensor,
    E: tl.constexpr,
) -> tl.tensor:
    """Results float32 [M, N] of complete sums."""
    if E.HAS_SUMS:
        acc += tl.load(sums, mask=is_out, other=0)[None, :]
    result = acc.to(tl.float32)
    if E.FACTORED:
        result *= factor[:, None]
    if E.SCALED:
        result *= tl.load(scales, mask=is_out, other=0.0)[None, :]
    if E.HAS_BIAS:
        result += tl.load(bias, mask=is_out, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def _gate(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """silu(gate) * up; or "clamped", that of gpt-oss (models/gpt_oss.py)."""
    if KIND == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_outputs(
    out: tl.tensor,
    acc: tl.tensor,
    gated: tl.tensor,
    factors: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    source: tl.tensor,
    outs: tl.tensor,
    is_row: tl.tensor,
    is_out: tl.tensor,
    mask: tl.tensor,
    GATE: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Corrects complete sums, applies the gate and stores [M, N] at `out`."""
    factor = tl.load(factors + source, mask=is_row, other=0.0) if E.FACTORED else is_row.to(tl.float32)
    result = _finish(acc, factor, scales, sums, bias, is_out, E)
    if GATE != "":
        up = _finish(gated, factor, scales + outs, sums + outs, bias + outs, is_out, E)
        result = _gate(result, up, GATE)
    tl.store(out, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_parts(at: tl.tensor, size: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """The sum of what all programs of a tile have stored, in their order."""
    total = tl.load(at, mask=mask, other=0, cache_modifier=".cg")
    for split in range(1, tl.num_programs(1)):
        total += tl.load(at + split * size, mask=mask, other=0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def add_splits_kernel(
    out: tl.tensor,
    parts: tl.tensor,
    factors: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    outs: tl.tensor,
    FACTORED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, blocks of a row): out [rows, outs] of partial sums [SPLITS, rows, outs]."""
    E: tl.constexpr = Epilogue(FACTORED, SCALED, HAS_SUMS, HAS_BIAS)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_out = n < outs
    total = tl.load(parts + row * outs + n, mask=is_out, other=0)
    for split in range(1, SPLITS):
        total += tl.load(parts + (split * num_rows + row) * outs + n, mask=is_out, other=0)
    factor = tl.load(factors + row + tl.arange(0, 1)) if FACTORED else tl.full((1,), 1.0, tl.float32)
    result = _finish(total[None, :], factor, scales + n, sums + n, bias + n, is_out, E)
    tl.store(out + row * outs + n[None, :], result.to(out.dtype.element_ty), mask=is_out[None, :])
