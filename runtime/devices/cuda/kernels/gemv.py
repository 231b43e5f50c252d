"""Products of a few rows with a weight in full, on the ordinary cores: such a product takes as long as
reading the weight, and tensor cores want at least sixteen rows.

A program has N outputs and walks the inputs K at a time, with the next numbers of the weight on their way
while it multiplies. Of one row each thread keeps sums of its own to the end; of more there is no room for
them, and they are summed at every K. Nothing that runs before writes to the weight, so with EARLY the first
numbers are on their way before the kernel ahead has ended (launch.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import Gpu, await_inputs, launch_options, starts_early

# rows up to: outputs of a program (half of them where it has gates), inputs at a time, warps
TILES = {1: (4, 512, 4), 8: (4, 1024, 4)}
# of weights that are multiplied here: cuBLAS reads larger ones at 86 to 93 % of an H100's bandwidth, 6144 x
# 4096 at 81 and 4096 x 4096 at 67, where this kernel reaches 86 and 83
MOST_NUMBERS = 1 << 25


@triton.jit
def _weights(
    at: tl.tensor, begin: tl.tensor, ins: tl.tensor, is_out: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """The numbers [N, K] from input `begin` on, of outputs whose weights begin at `at` [N]."""
    inside = begin + tl.arange(0, K)
    mask = is_out[:, None] & (inside < ins)[None, :]
    return tl.load(at[:, None] + inside[None, :], mask=mask, other=0.0)


@triton.jit
def _add_product(acc: tl.tensor, weights: tl.tensor, x: tl.tensor, row: tl.constexpr) -> tl.tensor:
    """Sums [ROWS, N], to those of one row the products of weights [N, K] with its inputs [K]."""
    part = tl.sum(weights * x[None, :], 1)
    return tl.where((tl.arange(0, acc.shape[0]) == row)[:, None], acc + part[None, :], acc)


@triton.jit(do_not_specialize=["count"])
def gemv_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Grid (tiles of N outputs,): out [count, outs] of x [count, ins] and weight [outs, ins]; ROWS: the power
    of two from `count` on. GATED: silu(gate) * up with gates in the first `outs` rows of weight [2 * outs,
    ins]."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    is_out = n < outs
    at = weight + n.to(tl.int64) * ins
    up_at = at + outs.to(tl.int64) * ins
    ahead = _weights(at, 0, ins, is_out, K)
    up_ahead = _weights(up_at, 0, ins, is_out, K) if GATED else ahead
    await_inputs(EARLY)
    WIDE: tl.constexpr = ROWS == 1
    acc = tl.zeros((N, K) if WIDE else (ROWS, N), tl.float32)
    up_acc = tl.zeros((N, K) if WIDE else (ROWS, N), tl.float32)
    for begin in tl.range(0, ins, K):
        weights, up_weights = ahead.to(tl.float32), up_ahead.to(tl.float32)
        ahead = _weights(at, begin + K, ins, is_out, K)
        up_ahead = _weights(up_at, begin + K, ins, is_out, K) if GATED else ahead
        inside = begin + tl.arange(0, K)
        for row in tl.static_range(ROWS):
            is_there = (inside < ins) & (row < count)
            values = tl.load(x + row * stride + inside, mask=is_there, other=0.0).to(tl.float32)
            acc = acc + weights * values[None, :] if WIDE else _add_product(acc, weights, values, row)
            if GATED and WIDE:
                up_acc += up_weights * values[None, :]
            elif GATED:
                up_acc = _add_product(up_acc, up_weights, values, row)
    if WIDE:
        acc, up_acc = tl.sum(acc, 1)[None, :], tl.sum(up_acc, 1)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=is_out, other=0.0).to(tl.float32)[None, :]
    rows = tl.arange(0, ROWS)
    mask = (rows < count)[:, None] & is_out[None, :]
    tl.store(out + rows[:, None] * outs + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


def takes_gemv(x: Tensor, weight: Tensor, most: int) -> bool:
    """Whether x [rows, ins] has so few rows, at most `most`, that `gemv` multiplies it with a weight in full,
    which is not large."""
    is_small = weight.numel() <= MOST_NUMBERS and weight.is_contiguous()
    return 0 < len(x) <= most and is_small and not torch.compiler.is_compiling()


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, gpu: Gpu, *, is_gated: bool = False) -> Tensor:
    """x [rows, ins] and weight [outs, ins] -> [rows, outs] in the dtype of x; or with gates above what they
    gate, silu(gate) * up [rows, outs / 2]. For few rows."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    outs = len(weight) // 2 if is_gated else len(weight)
    out = x.new_empty(len(x), outs)
    most, inputs, warps = next(tile for rows, tile in TILES.items() if len(x) <= rows)
    tile = most // 2 if is_gated else most
    early = starts_early(gpu)
    gemv_kernel[(triton.cdiv(outs, tile),)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        outs,
        x.shape[1],
        x.stride(0),
        len(x),
        ROWS=triton.next_power_of_2(len(x)),
        GATED=is_gated,
        HAS_BIAS=bias is not None,
        EARLY=early,
        N=tile,
        K=inputs,
        num_warps=warps,
        **launch_options(early=early),
    )
    return out
