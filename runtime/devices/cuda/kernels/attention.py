"""Paged attention for decode, extend and absorbed MLA rows in one kernel.

A program has a tile of queries: some tokens of one row times some of the heads that share a KV head, so that
the tile of a decode row is as tall as the tensor cores want and keys are read once for all of its heads
(Ainslie et al., 2023). It walks the keys with a running maximum and sum (Milakov and Gimelshein, 2018; Dao,
2023): first the keys that the window cuts, then those that all queries see, then the diagonal; only the first
and the last are masked. Where there are fewer programs than the GPU has room for, the keys are split among
several programs, whose partial results attention_splits.py joins (Dao et al., Flash-Decoding, 2023): in a
launch of its own, or with MERGES in the program of a tile that is the last to be done. With LISTED programs
find in a list which part of which row they have (decode_work.py).

Nothing depends on the host but the grid: rows are described in device memory, so a launch may be part of a
CUDA graph. What changes from step to step is no constant of the kernel, nor is its alignment, so that a form
of layer has few variants. The output of a row without tokens is zeros. With LATENT the values are the keys
(absorbed MLA), and a second part of the keys is in another cache.
"""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.attention_keys import Form, Queries, Sizes, Softmax, attend_keys, cache_of
from runtime.devices.cuda.kernels.attention_splits import LOG2E, NEG_INF, merge_tile
from runtime.devices.cuda.kernels.launch import await_inputs


@triton.jit
def _load_queries(
    q: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    is_query: tl.tensor,
    stride: tl.tensor,
    head_stride: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """[M, BLOCK] of q [tokens, heads, DIM]."""
    dims = tl.arange(0, BLOCK)
    at = q + tokens[:, None] * stride + heads[:, None] * head_stride + dims[None, :]
    return tl.load(at, mask=is_query[:, None] & (dims < DIM)[None, :], other=0).to(DOT)


@triton.jit
def _numbers_of(at: tl.tensor, num_rows: tl.tensor) -> tuple:
    """The slot of a row, where it starts, and its number of tokens."""
    return tl.load(at), tl.load(at + num_rows), tl.load(at + 2 * num_rows)


@triton.jit
def _listed_part(at: tl.tensor, num_parts: tl.tensor) -> tuple:
    """The row of a program's part, its number, and the row's number of parts; see list_work_kernel."""
    return tl.load(at), tl.load(at + num_parts), tl.load(at + 2 * num_parts)


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles", "first_query"],
    # read by the number, or by the head
    do_not_specialize_on_alignment=["tables", "rows", "tiles", "sinks", "slopes", "counters"],
)
def paged_attention_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    merged: tl.tensor,
    counters: tl.tensor,
    q: tl.tensor,
    q_rope: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    ropes: tl.tensor,
    tables: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    first_query: tl.tensor,
    table_stride: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    rope_q_stride: tl.tensor,
    rope_q_head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    rope_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGES: tl.constexpr,
    TILED: tl.constexpr,
    LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BIASED: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
    TMA: tl.constexpr,
    FOLDS: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Grid (tiles, KV heads * parts of a group, splits). `rows` int32 [4, num_rows]: slot, start, count,
    first query; `tiles` int32 [2, num_tiles]: row and first token in it; with TILED False tile i is row i.
    Queries and results begin with query `first_query`. With KV_HEADS 0 the grid says how many there are. With
    splits, out [tokens, heads, splits, DV] and lse [tokens, heads, splits] are float32 partial results; with
    one, out [tokens, heads, DV] is the result. With MERGES the last program of a tile's heads makes `merged`,
    the result, of them, and `counters`, int32 [tiles * columns], are 0 before and after the launch. With
    LISTED, which is with MERGES, the grid is (parts, ..., 1), `tiles` is int32 [3, num_tiles] of
    list_work_kernel, out [parts, heads, DV] and lse [parts, heads] are its parts' partial results, and there
    are counters [rows * columns]. TMA and what follows it: see attention_keys.py; with TMA `keys`, `values`
    and `ropes` are descriptors."""
    FORM: tl.constexpr = Form(TMA, FOLDS, TOGETHER)
    S: tl.constexpr = Sizes(
        WINDOW, CAPPED, BIASED, LATENT, PAGE, M, N, DK, DV, DR, BLOCK_K, BLOCK_V, BLOCK_R, FP8, DOT, FORM
    )
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    await_inputs(EARLY)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    kv_heads = KV_HEADS if KV_HEADS > 0 else tl.num_programs(1) // PARTS
    kv_head, part = tl.program_id(1) % kv_heads, tl.program_id(1) // kv_heads
    row, offset = tl.program_id(0), 0
    if LISTED:
        row, split, num_splits = _listed_part(tiles + tl.program_id(0), num_tiles)
    if TILED:
        row, offset = tl.load(tiles + tl.program_id(0)), tl.load(tiles + num_tiles + tl.program_id(0))
    slot, start, count = _numbers_of(rows + row, num_rows)
    query = tl.load(rows + 3 * num_rows + row) + offset - first_query
    TOKENS: tl.constexpr = M // HEADS
    index = tl.arange(0, M)
    token, member = index // HEADS, part * HEADS + index % HEADS
    num_tokens = tl.minimum(count - offset, TOKENS)
    is_query = (token < tl.maximum(num_tokens, 1)) & (token < TOKENS) & (member < GROUP)
    head = kv_head * GROUP + member
    front = start + offset  # position of the first query
    rear = tl.where(num_tokens > 0, front + num_tokens - 1, -1)
    at = (query + token).to(tl.int64)
    q_tile = _load_queries(q, at, head, is_query, q_stride, q_head_stride, DK, BLOCK_K, DOT)
    rope_tile = q_tile
    if LATENT:
        rope_tile = _load_queries(
            q_rope, at, head, is_query, rope_q_stride, rope_q_head_stride, DR, BLOCK_R, DOT
        )
    tile_slopes = tl.load(slopes + head, mask=is_query, other=0.0) * LOG2E if BIASED else scale
    positions = front + token if TILED else tl.minimum(front + token, rear)
    queries = Queries(q_tile, rope_tile, positions, scale, cap, tile_slopes)
    strides = table_stride, key_stride, value_stride, rope_stride
    cache = cache_of((keys, values, ropes), tables, slot, kv_head, strides, S)
    state = attend_keys(queries, cache, front, rear, split, num_splits, SPLIT, S)
    if TILED:  # from what is at hand behind the keys: a number of tokens held so long was spilled (MLA)
        is_query = ((token == 0) | (positions <= rear)) & (token < TOKENS) & (member < GROUP)
    if HAS_SINKS and not SPLIT:
        state = _add_sink(state, tl.load(sinks + head, mask=is_query, other=NEG_INF).to(tl.float32) * LOG2E)
    heads = at * (kv_heads * GROUP) + head
    stride = kv_heads * GROUP if LISTED else 1
    parts = (tl.program_id(0) - split).to(tl.int64) * stride + head if LISTED else heads * num_splits
    target = parts + split * stride if SPLIT else heads
    _store_result(out, lse, target, state, is_query, SPLIT, DV, BLOCK_V)
    if MERGES:
        place = counters + row * tl.num_programs(1) + tl.program_id(1), sinks + head, heads, parts, stride
        if split < num_splits:
            merge_tile(merged, out, lse, *place, num_splits, is_query, HAS_SINKS, M, DV, BLOCK_V)


@triton.jit
def _store_result(
    out: tl.tensor,
    lse: tl.tensor,
    target: tl.tensor,
    state: Softmax,
    is_query: tl.tensor,
    SPLIT: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Divides by the sums and stores rows `target` [M] of `out`; with splits, also their binary lse."""
    dims = tl.arange(0, BLOCK_V)
    divisor = tl.where(state.row_sum == 0.0, 1.0, state.row_sum)
    acc = state.acc / divisor[:, None]
    if SPLIT:
        sums = tl.where(state.row_sum == 0.0, NEG_INF, state.row_max + tl.log2(divisor))
        tl.store(lse + target, sums, mask=is_query)
    tl.store(
        out + target[:, None] * DV + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_query[:, None] & (dims < DV)[None, :],
    )


@triton.jit
def _add_sink(state: Softmax, sink: tl.tensor) -> Softmax:
    """Adds a learned logit that takes its share of the sum and has no value (Xiao et al., 2023)."""
    new_max = tl.maximum(state.row_max, sink)
    new_max = tl.where(new_max == NEG_INF, 0.0, new_max)
    rescale = tl.exp2(state.row_max - new_max)
    row_sum = state.row_sum * rescale + tl.exp2(sink - new_max)
    return Softmax(state.acc * rescale[:, None], state.row_max, row_sum)
