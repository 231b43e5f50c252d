"""The RMS norm of a sum and the product of that norm with a weight in full, in one launch for few rows.

Every program reads the rows whole, as it multiplies: it adds up the squares of the sum while it multiplies
the sum, times the norm's weight, with its part of the product's weight. The norm's scale, one number for a
row, is applied to what came out. So the sum is read once, and nothing waits for the norm. What is multiplied
is rounded as often as the norm itself would be, one factor earlier.

The programs share the writing of the sum, and of the norm where others read it too: each writes every
so-manieth block of columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import (
    INTERPRETER,
    Gpu,
    await_inputs,
    dot_type,
    launch_options,
    next_power_of_2,
    starts_early,
)
from runtime.devices.operands import NormInputs

ROWS = 16  # the most rows: one tile of the tensor cores
OUTPUTS = (64, 32, 16)  # of a program: the most of these with which programs fill the GPU
MOST_STAGES = 4


@triton.jit
def _summed(
    x: tl.tensor, residual: tl.tensor, at: tl.tensor, residual_at: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """x + residual in float32, rounded to the dtype of the residual."""
    total = tl.load(residual + residual_at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(residual.dtype.element_ty)


@triton.jit
def _weights(
    at: tl.tensor, column: tl.tensor, ins: tl.tensor, is_out: tl.tensor, EVEN: tl.constexpr, DOT: tl.constexpr
) -> tl.tensor:
    """Numbers [N, K] of the outputs whose rows begin at `at` [N]."""
    mask = is_out[:, None] if EVEN else is_out[:, None] & (column < ins)[None, :]
    return tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(DOT)


@triton.jit(do_not_specialize=["count"])
def norm_product_kernel(
    out: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    count: tl.tensor,
    eps: tl.tensor,
    GATED: tl.constexpr,
    KEEPS: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles of N outputs,): total [count, ins] = x + residual, and out [count, outs], its norm times
    weight [outs, ins]. GATED: silu(gate) * up with gates in the first `outs` rows of weight [2 * outs, ins].
    KEEPS: also normed [count, ins]. EVEN: K divides `ins`."""
    n, row, inside = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, M), tl.arange(0, K)
    is_out, is_row = n < outs, (row < count)[:, None]
    at = weight + n.to(tl.int64) * ins
    up_at = at + outs.to(tl.int64) * ins
    rows_at, residual_rows = row[:, None] * stride, row[:, None] * residual_stride
    acc, up_acc = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    squares = tl.zeros((M, K), tl.float32)
    await_inputs(EARLY)
    for begin in tl.range(0, ins, K):
        column = begin + inside
        mask = is_row & (column < ins)[None, :]
        kept = _summed(x, residual, rows_at + column[None, :], residual_rows + column[None, :], mask)
        is_mine = begin // K % tl.num_programs(0) == tl.program_id(0)
        tl.store(total + row[:, None] * ins + column[None, :], kept, mask=mask & is_mine)
        summed = kept.to(tl.float32)
        squares += summed * summed
        factors = tl.load(norm + column, mask=column < ins, other=0.0).to(tl.float32)
        given = (summed * factors[None, :]).to(x.dtype.element_ty).to(DOT)
        w = _weights(at, column, ins, is_out, EVEN, DOT)
        acc = tl.dot(given, tl.trans(w), acc, input_precision="tf32x3")
        if GATED:
            w = _weights(up_at, column, ins, is_out, EVEN, DOT)
            up_acc = tl.dot(given, tl.trans(w), up_acc, input_precision="tf32x3")
    scale = tl.rsqrt(tl.sum(squares, 1) / ins + eps)[:, None]
    result = acc * scale
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * (up_acc * scale)
    target = out + row[:, None] * outs + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_row & is_out[None, :])
    if KEEPS:
        for begin in tl.range(tl.program_id(0) * K, ins, tl.num_programs(0) * K):
            column = begin + inside
            mask = is_row & (column < ins)[None, :]
            kept = _summed(x, residual, rows_at + column[None, :], residual_rows + column[None, :], mask)
            factors = tl.load(norm + column, mask=column < ins, other=0.0).to(tl.float32)
            found = (kept.to(tl.float32) * scale * factors[None, :]).to(normed.dtype.element_ty)
            tl.store(normed + row[:, None] * ins + column[None, :], found, mask=mask)


def takes_norm(inputs: NormInputs, packed: object) -> bool:
    """Whether `norm_product` computes this: few rows, and a weight in full. Numbers of float16 would
    overflow, as the norm's scale comes last."""
    is_few = 0 < len(inputs.x) <= ROWS and inputs.x.dtype != torch.float16
    is_held = inputs.x.stride(1) == inputs.residual.stride(1) == 1
    is_plain = isinstance(packed, Tensor) and packed.is_contiguous()
    return is_few and is_held and is_plain and not torch.compiler.is_compiling()


def norm_product(
    inputs: NormInputs,
    weight: Tensor,
    gpu: Gpu,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
    keeps_norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual, both [rows, ins], times weight [outs, ins] -> ([rows, outs] in `dtype`, x +
    residual, the norm). `is_gated`: as of `gemv`; without `keeps_norm` the norm is not made, and the sum is
    in its place."""
    x, residual = inputs.x, inputs.residual
    rows, ins = x.shape
    outs = len(weight) // 2 if is_gated else len(weight)
    out, total = x.new_empty(rows, outs, dtype=dtype), residual.new_empty(rows, ins)
    normed = x.new_empty(rows, ins) if keeps_norm else total
    tile, block, stages = _tile(outs, ins, x.itemsize, gpu, is_gated=is_gated)
    early = starts_early(gpu)
    norm_product_kernel[(triton.cdiv(outs, tile),)](
        out,
        total,
        normed,
        x,
        residual,
        inputs.weight,
        weight,
        outs,
        ins,
        x.stride(0),
        residual.stride(0),
        rows,
        inputs.eps,
        GATED=is_gated,
        KEEPS=keeps_norm,
        EARLY=early,
        EVEN=ins % block == 0,
        M=ROWS,
        N=tile,
        K=block,
        DOT=dot_type(x.dtype),
        num_warps=4,
        num_stages=stages,
        **launch_options(early=early),
    )
    return out, total, normed


def _tile(outs: int, ins: int, itemsize: int, gpu: Gpu, *, is_gated: bool) -> tuple[int, int, int]:
    """Outputs of a program, inputs at a time, and stages of what is read ahead. A program of few outputs
    reads more of each at a time: there are few of them, and they wait for memory."""
    if gpu == INTERPRETER:
        return min(128, next_power_of_2(outs, 16)), min(256, next_power_of_2(ins, 16)), 1
    sizes = OUTPUTS[1:] if is_gated else OUTPUTS
    tile = next((size for size in sizes if triton.cdiv(outs, size) >= gpu.num_cores), sizes[-1])
    block = (256 if tile == OUTPUTS[-1] else 128) * 2 // itemsize
    per_stage = block * itemsize * (2 * ROWS + tile * (1 + is_gated))
    room = min(gpu.shared_bytes, 228 << 10) - (4 << 10)
    return tile, block, max(2, min(MOST_STAGES, room // per_stage))
