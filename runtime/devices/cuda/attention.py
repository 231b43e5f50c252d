"""Attention on the card: what a step's plan knows once, and the launches of a layer.

Decode rows and rows that extend are two launches of one kernel: a tile of the first is one token, of the
second as many as the tensor cores like. Tiles of prompts are listed here, those with the most keys first, so
that the last program to begin is a short one.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import triton
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.kernels.attention import LOG2E, attend, merge
from runtime.devices.cuda.kernels.launch import INTERPRETER, NARROW, Card, dot_type, power
from runtime.layers.upload import upload
from runtime.messages.steps import StepPlan

FILL = 3  # programs per multiprocessor below which keys are split
MERGED = 8192  # numbers of parts that a program of `merge` holds


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one launch: all decodes of a step, or all of its other rows."""

    rows: Tensor  # int32 [4, R] on the device: slot, start, count, first query
    first: int  # their first query
    num_queries: int
    longest: int  # keys of the longest row; where rows live on the device only, what they may come to
    # int32 [2, R] on the host: start and count of rows that need tiles; None: one token each
    ends: np.ndarray | None
    # by tokens of a tile, as layers ask for them; int32 [2, tiles]
    tiles: dict[int, Tensor] = field(default_factory=dict)

    @property
    def queries(self) -> slice:
        return slice(self.first, self.first + self.num_queries)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share."""

    spans: tuple[Span, ...]
    page_tables: Tensor  # int32 [pools, max_slots, pages]
    page_size: int
    # by their first query, rows alone, as layers ask for them
    singles: dict[int, Span] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program: queries, keys at a time, warps, and stages of the pipeline that reads keys."""

    m: int
    n: int
    warps: int
    stages: int


def plan_attention(plan: StepPlan, page_tables: Tensor, page_size: int) -> AttentionPlan:
    """One copy to the device for all rows."""
    starts, counts = plan.starts.astype(np.int32), plan.counts.astype(np.int32)
    queries = np.cumsum(counts, dtype=np.int32) - counts
    rows = upload(np.stack((plan.slots.astype(np.int32), starts, counts, queries)), page_tables.device)
    spans, num = [], plan.num_decodes
    ends = starts + counts
    if num:
        spans.append(Span(rows[:, :num], 0, num, int(ends[:num].max()), None))
    if num < len(counts):
        spans.append(
            Span(
                rows[:, num:],
                num,
                int(counts[num:].sum()),
                int(ends[num:].max()),
                np.stack((starts[num:], counts[num:])),
            )
        )
    return AttentionPlan(tuple(spans), page_tables, page_size)


def plan_decodes(slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int) -> AttentionPlan:
    """Of tensors alone, int64 [R]: into how many parts keys are split depends on what a page table holds, not
    on the lengths."""
    num = len(slots)
    rows = torch.stack(
        (slots, lengths - 1, torch.ones_like(slots), torch.arange(num, device=slots.device))
    ).int()
    return AttentionPlan(
        (Span(rows, 0, num, page_tables.shape[2] * page_size, None),), page_tables, page_size
    )


def list_tiles(ends: np.ndarray, tokens: int) -> np.ndarray:
    """Rows [2, R] as tiles of so many tokens: int32 [2, tiles], row and first token in it, the most keys
    first."""
    starts, counts = ends
    per_row = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), per_row)
    offset = (np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(per_row) - per_row, per_row)).astype(
        np.int32
    ) * tokens
    order = np.argsort(-(starts[row] + offset), kind="stable")
    return np.stack((row[order], offset[order]))


def choose_tile(num_lines: int, dim: int, itemsize: int, card: Card) -> Tile:
    """For tiles of at most `num_lines` queries. By what the compiler says of registers and shared memory:
    tests/devices/cuda/ahead.py.

    Page ids take every second stage of the pipeline, so five stages hold two tiles of keys and values, three
    hold one.
    """
    if card == INTERPRETER:
        return Tile(min(power(num_lines, 16), 64), 128, 4, 1)
    is_large = card.shared_bytes >= 200 << 10  # else three quarters of a hundred KiB must do
    stages = 5 if is_large else 3
    if itemsize == 4:
        return Tile(
            16 if num_lines <= 16 or dim > 128 else 32,
            32 if dim <= 128 else 16,
            4,
            3 if num_lines <= 16 and is_large else 2,
        )
    if dim > 256:  # latents
        return (
            Tile(16, 32, 4, stages if is_large else 2)
            if num_lines <= 16 or not is_large
            else Tile(64, 32, 8, stages)
        )
    if num_lines <= 32:
        return Tile(power(num_lines, 16), 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, stages)
    if not is_large:
        return Tile(64, 64 if dim <= 128 else 32, 4, 3 if dim <= 128 else 2)
    return (
        Tile(128, 64 if dim <= 128 else 32, 8, stages)
        if num_lines > 64
        else Tile(64, 64 if dim <= 128 else 32, 4, stages)
    )


def choose_splits(num_programs: int, longest: int, tile: Tile, card: Card) -> int:
    """Into how many parts keys are split: a power of two, so that programs fill the card, and each has four
    tiles at least."""
    wanted = FILL * card.num_cores // max(1, num_programs)
    return 1 << max(0, min(wanted, longest // (4 * tile.n), 128).bit_length() - 1)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scores: Scores, card: Card
) -> Tensor:
    """q [T, H, DK] over caches [places, K, DK] and [places, K, DV] -> [T, H, DV]."""
    out = q.new_empty(*q.shape[:2], v_cache.shape[2])
    for span in plan.spans:
        part = span.queries
        attend_span(out[part], q[part], k_cache, v_cache, span, plan, scores, card)
    return out


def attend_span(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    span: Span,
    plan: AttentionPlan,
    scores: Scores,
    card: Card,
    q_rope: Tensor | None = None,
    ropes: Tensor | None = None,
) -> None:
    """The queries of a span, q [n, H, DK] -> out [n, H, DV]. With `ropes`, keys have a second part in another
    cache, [places, 1, P], for which queries have q_rope [n, H, P], and the first part of keys is the values
    (absorbed latent attention)."""
    kv_heads, dim_k, dim_v = keys.shape[1], keys.shape[2], values.shape[2]
    dim_r = 0 if ropes is None else ropes.shape[2]
    group = q.shape[1] // kv_heads
    most = 1 if span.ends is None else int(span.ends[1].max())
    tile = choose_tile(most * group, max(dim_k, dim_v), q.itemsize, card)
    heads = min(group, tile.m)
    tiles = None if span.ends is None else _tiles_of(span, tile.m // heads)
    num_tiles = span.num_queries if tiles is None else tiles.shape[1]
    columns = kv_heads * triton.cdiv(group, heads)
    splits = choose_splits(num_tiles * columns, min(span.longest, scores.window or span.longest), tile, card)
    target, sums = (
        (out, out)
        if splits == 1
        else (
            q.new_empty(span.num_queries, q.shape[1], splits, dim_v, dtype=torch.float32),
            q.new_empty(span.num_queries, q.shape[1], splits, dtype=torch.float32),
        )
    )
    kind = NARROW.get(keys.dtype, "")
    caches = [x if not kind or x is None else x.view(torch.uint8) for x in (keys, values, ropes)]
    table = plan.page_tables[-1 if scores.window else 0]
    queries = q if q_rope is None else q_rope
    rows = span.rows
    attend[(num_tiles, columns, splits)](
        target,
        sums,
        q,
        queries,
        caches[0],
        caches[1],
        caches[0] if caches[2] is None else caches[2],
        table,
        rows,
        rows if tiles is None else tiles,
        rows if scores.sinks is None else scores.sinks,
        rows.stride(0),
        num_tiles,
        span.first,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        queries.stride(0),
        queries.stride(1),
        keys.stride(0),
        values.stride(0),
        0 if ropes is None else ropes.stride(0),
        scores.scale / scores.cap if scores.cap else scores.scale * LOG2E.value,
        scores.cap * LOG2E.value,
        GROUP=group,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SPLITS=splits,
        TILED=tiles is not None,
        WINDOW=scores.window,
        CAPPED=scores.cap > 0,
        HAS_SINKS=scores.sinks is not None,
        LATENT=ropes is not None,
        PAGE=plan.page_size,
        M=tile.m,
        N=tile.n,
        DK=dim_k,
        DV=dim_v,
        DR=dim_r,
        BLOCK_K=power(dim_k, 16),
        BLOCK_V=power(dim_v, 16),
        BLOCK_R=power(dim_r, 16),
        NARROW=kind,
        DOT=dot_type(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        block = min(power(dim_v, 16), MERGED // splits)
        sinks = sums if scores.sinks is None else scores.sinks
        merge[(span.num_queries, q.shape[1], triton.cdiv(dim_v, block))](
            out, target, sums, sinks, SPLITS=splits, HAS_SINKS=scores.sinks is not None, DV=dim_v, BLOCK=block
        )


def _tiles_of(span: Span, tokens: int) -> Tensor:
    assert span.ends is not None
    if tokens not in span.tiles:
        span.tiles[tokens] = upload(list_tiles(span.ends, tokens), span.rows.device)
    return span.tiles[tokens]
