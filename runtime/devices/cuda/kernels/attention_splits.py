"""The merge of sequences whose keys paged attention has split among several programs."""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.attention import LOG2E, NEG_INF


@triton.jit
def merge_splits_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (tokens, heads, blocks of DV): out [tokens, heads, DV] of the partial results and binary lse of
    `paged_attention_kernel`."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    shares = tl.load(lse + row * SPLITS + splits)
    row_max = tl.max(shares, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2E
        row_max = tl.maximum(row_max, sink)
    row_max = tl.where(row_max == NEG_INF, 0.0, row_max)
    shares = tl.exp2(shares - row_max)
    row_sum = tl.sum(shares, 0)
    if HAS_SINKS:
        row_sum += tl.exp2(sink - row_max)
    partial = tl.load(
        partials + (row * SPLITS + splits)[:, None] * DV + dims[None, :], mask=(dims < DV)[None, :], other=0.0
    )
    acc = tl.sum(partial * shares[:, None], 0) / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + row * DV + dims, acc.to(out.dtype.element_ty), mask=dims < DV)
