"""The merge of sequences whose keys paged attention has split among several programs: in a launch of its own,
or by the last program of attention that is done with a tile (last_program.py)."""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.last_program import is_last_program

NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
TOGETHER: tl.constexpr = tl.constexpr(16)  # partial results that a program of the launch holds at a time


@triton.jit
def merge_tile(
    merged: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    counter: tl.tensor,
    sinks: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    is_row: tl.tensor,
    HAS_SINKS: tl.constexpr,
    M: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Merges rows [M] of a tile if this program is the last one of its splits. `parts` [M]: where the first
    partial result of each row is; the next one is `stride` behind it. `sinks`: pointers [M] to a learned
    logit of each row."""
    if is_last_program(counter, num_splits):
        sink = tl.full((M,), NEG_INF, tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks, mask=is_row, other=NEG_INF).to(tl.float32) * LOG2E
        _merge(merged, partials, lse, sink, rows, parts, stride, num_splits, is_row, M, DV, BLOCK_V)


@triton.jit
def _merge(
    merged: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    sink: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    is_row: tl.tensor,
    M: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Rows `rows` [M] of `merged` [.., DV], of the partial results [.., DV] and binary lse [..] that other
    programs have stored at `parts` [M] and every `stride` behind. `sink` [M]: a learned logit of each row,
    -inf for none."""
    dims = tl.arange(0, BLOCK_V)
    row_max = sink
    for split in range(0, num_splits):
        at = lse + parts + split * stride
        # not of this multiprocessor's cache, which may be older than what others have stored
        row_max = tl.maximum(row_max, tl.load(at, mask=is_row, other=NEG_INF, cache_modifier=".cg"))
    row_max = tl.where(row_max == NEG_INF, 0.0, row_max)
    row_sum = tl.exp2(sink - row_max)
    acc = tl.zeros((M, BLOCK_V), tl.float32)
    mask = is_row[:, None] & (dims < DV)[None, :]
    for split in range(0, num_splits):
        place = parts + split * stride
        share = tl.exp2(tl.load(lse + place, mask=is_row, other=NEG_INF, cache_modifier=".cg") - row_max)
        partial = tl.load(
            partials + place[:, None] * DV + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        row_sum += share
        acc += partial * share[:, None]
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(merged + rows[:, None] * DV + dims[None, :], acc.to(merged.dtype.element_ty), mask=mask)


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
