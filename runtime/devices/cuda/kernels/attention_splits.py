"""The merge of sequences whose keys paged attention has split among several programs."""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.attention import LOG2E, NEG_INF

TOGETHER: tl.constexpr = tl.constexpr(16)  # partial results that a program holds at a time


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["sinks"])
def merge_splits_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    num_splits: tl.tensor,
    HAS_SINKS: tl.constexpr,
    MOST: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (tokens, heads, blocks of DV): out [tokens, heads, DV] of the partial results and binary lse of
    `paged_attention_kernel`, of `num_splits` splits, at most MOST."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dims, splits = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, MOST)
    sums = tl.load(lse + row * num_splits + splits, mask=splits < num_splits, other=NEG_INF)
    row_max = tl.max(sums, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2E
        row_max = tl.maximum(row_max, sink)
    row_max = tl.where(row_max == NEG_INF, 0.0, row_max)
    row_sum = tl.sum(tl.exp2(sums - row_max), 0)
    if HAS_SINKS:
        row_sum += tl.exp2(sink - row_max)
    acc = tl.zeros((BLOCK,), tl.float32)
    for at in tl.range(0, num_splits, TOGETHER):
        split = at + tl.arange(0, TOGETHER)
        is_split = split < num_splits
        shares = tl.exp2(tl.load(lse + row * num_splits + split, mask=is_split, other=NEG_INF) - row_max)
        partial = tl.load(
            partials + (row * num_splits + split)[:, None] * DV + dims[None, :],
            mask=is_split[:, None] & (dims < DV)[None, :],
            other=0.0,
        )
        acc += tl.sum(partial * shares[:, None], 0)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + row * DV + dims, acc.to(out.dtype.element_ty), mask=dims < DV)
