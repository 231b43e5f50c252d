"""Paged attention on a GPU: the plan of a step, made once, and the kernel launches of a layer.

Decode rows and rows that extend are two launches of one kernel: a tile of the first is one token, of the
second as many tokens as the tensor cores like. Tiles of extend rows are listed on the host, those with the
most keys first, so that the last program to begin is a short one.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention_blocks import (
    ROLES_DTYPE,
    as_arguments,
    cache_formats,
    launch_latents_with_roles,
    launch_with_roles,
)
from runtime.devices.cuda.attention_tiles import (
    FILL,
    MAX_SPLITS,
    Tile,
    list_query_tiles,
    select_splits,
    select_tile,
)
from runtime.devices.cuda.kernels.attention import paged_attention_kernel
from runtime.devices.cuda.kernels.attention_splits import LOG2E, merge_splits_kernel
from runtime.devices.cuda.kernels.decode_work import MOST_ROWS, list_work
from runtime.devices.cuda.kernels.launch import FP8_KINDS, Gpu, launch_options, next_power_of_2, starts_early
from runtime.layers.upload import upload

PLAIN_PAGE = 64  # tokens of which pages hold a multiple, so that tiles read with TMA lie in one
PLAIN_ROPE = 64  # numbers of the rotary part of keys beside latents
LATENT_DIM = 512  # numbers of a latent that all forms of tiles know
MERGE_BLOCK = 512  # numbers of a result that a program of merge_splits_kernel computes
MOST_COUNTERS = 1 << 15  # rows times KV heads of a listed launch
# a page that holds any sequence: for keys that are contiguous, of as many heads as there is memory for
ONE_PAGE = 1 << 30


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Rows of one kernel launch: all decode rows of a step, or all of its other rows."""

    rows: Tensor  # int32 [4, R] on the device: slot, start, count, first query
    first: int  # their first query in the step
    num_queries: int
    max_kv_len: int  # keys of the longest row; for rows that only the device knows, the most there can be
    # int32 [2, R] on the host: start and count of rows that are cut into tiles; None: one token each
    ends: np.ndarray | None
    # number of tokens in a tile -> int32 [2, tiles], filled when a layer first needs it
    tiles: dict[int, Tensor] = field(default_factory=dict)
    # number of parts, window and keys of a tile -> what list_work made of decode rows, likewise
    work: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def queries(self) -> slice:
        """Where the queries of these rows are in the step."""
        return slice(self.first, self.first + self.num_queries)

    def tiles_of(self, tokens: int) -> Tensor:
        """Tiles of `tokens` tokens on the device, int32 [2, tiles]; see list_query_tiles."""
        assert self.ends is not None
        if tokens not in self.tiles:
            self.tiles[tokens] = upload(list_query_tiles(self.ends, tokens), self.rows.device)
        return self.tiles[tokens]

    def work_of(self, num_parts: int, window: int, tile: int) -> Tensor:
        """Parts of these decode rows; see list_work."""
        key = num_parts, window, tile
        if key not in self.work:
            self.work[key] = list_work(self.rows, num_parts, window, tile)
        return self.work[key]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share."""

    launches: tuple[AttentionLaunch, ...]
    page_tables: Tensor  # int32 [pools, max_slots, pages]
    page_size: int
    # first query -> launch of that row alone, filled when a layer first needs it (MLA)
    row_launches: dict[int, AttentionLaunch] = field(default_factory=dict)


def plan_attention(plan: AttentionRows, page_tables: Tensor, page_size: int) -> AttentionPlan:
    """The plan of a step. Its rows travel with the other arrays of the step, or in a copy of their own."""
    starts, counts = plan.starts.astype(np.int32), plan.counts.astype(np.int32)
    rows = upload(plan.stacked(), page_tables.device) if plan.packed is None else plan.packed.tensor
    launches, num = [], plan.num_decodes
    ends = starts + counts
    if num:
        launches.append(AttentionLaunch(rows[:, :num], 0, num, int(ends[:num].max()), None))
    if num < len(counts):
        host_rows = np.stack((starts[num:], counts[num:]))
        num_queries, max_kv_len = int(counts[num:].sum()), int(ends[num:].max())
        launches.append(AttentionLaunch(rows[:, num:], num, num_queries, max_kv_len, host_rows))
    return AttentionPlan(tuple(launches), page_tables, page_size)


def plan_decodes(slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int) -> AttentionPlan:
    """The plan of decode rows whose slots and lengths are tensors, int64 [R]. The number of splits depends on
    the size of the page table, not on the lengths."""
    num = len(slots)
    rows = torch.stack(
        (slots, lengths - 1, torch.ones_like(slots), torch.arange(num, device=slots.device))
    ).int()
    return plan_of_decodes(rows, page_tables, page_size)


def plan_of_decodes(rows: Tensor, page_tables: Tensor, page_size: int) -> AttentionPlan:
    """The plan of decode rows int32 [4, R], as of AttentionLaunch, whose lengths the host does not know."""
    longest = page_tables.shape[2] * page_size
    return AttentionPlan((AttentionLaunch(rows, 0, rows.shape[1], longest, None),), page_tables, page_size)


def split_counters(gpu: Gpu, torch_device: torch.device, *, lists: bool = False) -> Tensor:
    """What programs of one launch count themselves by, where the last one merges splits: as many numbers as
    programs without splits are split at all; with `lists`, of as many rows and heads as are listed. They are
    0 between launches."""
    num = FILL * gpu.num_cores
    return torch.zeros(max(num, MOST_COUNTERS) if lists else num, dtype=torch.int32, device=torch_device)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scores: Scores,
    gpu: Gpu,
    counters: Tensor | None = None,
    *,
    lists: bool = False,
) -> Tensor:
    """Attention of q [T, H, DK] over caches [tokens, K, DK] and [tokens, K, DV] -> [T, H, DV]. `counters`: of
    `split_counters`; None: splits are merged in a launch of their own. `lists`: decode rows are divided by a
    list on the device."""
    out = q.new_empty(*q.shape[:2], v_cache.shape[2])
    for launch in plan.launches:
        queries = launch.queries
        launch_attention(
            out[queries],
            q[queries],
            k_cache,
            v_cache,
            launch,
            plan,
            scores,
            gpu,
            counters=counters,
            lists=lists,
        )
    return out


@dataclass(frozen=True, slots=True)
class _Grid:
    """How the queries of a launch are cut into programs."""

    tile: Tile
    group: int  # query heads of a KV head
    heads: int  # of them in a tile
    tiles: Tensor | None  # int32 [2, tiles]; None: a tile is a row
    num_tiles: int
    columns: int  # programs side by side for the heads of one tile
    splits: int
    is_listed: bool = False  # `tiles` is int32 [3, tiles] of list_work


class _Result(NamedTuple):
    """What a launch writes: `out` and `lse` as paged_attention_kernel says; `merged` None: nothing merges."""

    out: Tensor
    lse: Tensor
    merged: Tensor | None
    counters: Tensor | None


def _is_plain(
    keys: Tensor, values: Tensor, ropes: Tensor | None, plan: AttentionPlan, scores: Scores
) -> bool:
    """Whether tiles of every form apply; see select_tile."""
    has_forms = scores.window > 0 or scores.cap > 0 or scores.slopes is not None
    are_blocks = keys.shape[2] == values.shape[2] and (ropes is None or ropes.shape[2] == PLAIN_ROPE)
    are_pages = plan.page_size % PLAIN_PAGE == 0 and len(keys) % plan.page_size == 0
    return are_pages and are_blocks and not has_forms and keys.dtype not in FP8_KINDS


def _grid_of(
    q: Tensor,
    keys: Tensor,
    dim: int,
    launch: AttentionLaunch,
    scores: Scores,
    gpu: Gpu,
    counters: Tensor | None,
    *,
    is_plain: bool,
    is_latent: bool,
) -> _Grid:
    """`counters`: of parts that are listed; None: nothing is. `is_plain`: see select_tile. `is_latent`: keys
    have a rotary part."""
    window = scores.window
    kv_heads = keys.shape[1]
    group = q.shape[1] // kv_heads
    max_queries = 1 if launch.ends is None else int(launch.ends[1].max())
    tile = select_tile(max_queries * group, dim, q.itemsize, gpu, is_plain=is_plain)
    heads = min(group, tile.m)
    columns = kv_heads * triton.cdiv(group, heads)
    rows = launch.num_queries
    lists = launch.ends is None and not tile.walk.groups
    if counters is not None and lists and rows <= min(MOST_ROWS, len(counters) // columns):
        work = launch.work_of(max(1, FILL * gpu.num_cores // columns), window, tile.n)
        return _Grid(tile, group, heads, work, work.shape[1], columns, 1, True)
    tiles = None if launch.ends is None else launch.tiles_of(tile.m // heads)
    num_tiles = rows if tiles is None else tiles.shape[1]
    max_kv_len = min(launch.max_kv_len, window or launch.max_kv_len)
    splits = select_splits(num_tiles * columns, max_kv_len, tile, gpu)
    is_fit = is_latent if dim == LATENT_DIM else splits == 1 and not is_latent
    is_fit = is_fit and scores.sinks is None and q.dtype == keys.dtype == ROLES_DTYPE
    if tile.walk.groups and not is_fit:
        return _grid_of(q, keys, dim, launch, scores, gpu, counters, is_plain=False, is_latent=is_latent)
    return _Grid(tile, group, heads, tiles, num_tiles, columns, splits)


def launch_attention(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    launch: AttentionLaunch,
    plan: AttentionPlan,
    scores: Scores,
    gpu: Gpu,
    q_rope: Tensor | None = None,
    ropes: Tensor | None = None,
    counters: Tensor | None = None,
    *,
    lists: bool = False,
) -> None:
    """Attention of the queries of one launch, q [n, H, DK] -> out [n, H, DV], written in place. `counters`
    and `lists`: see `attention`.

    With `ropes`, keys have a second part in another cache, [tokens, 1, P], for which queries have q_rope
    [n, H, P], and the first part of keys is the values (absorbed MLA).
    """
    dim_v = values.shape[2]
    dim = max(keys.shape[2], dim_v)
    is_plain = _is_plain(keys, values, ropes, plan, scores)
    listing, is_latent = counters if lists else None, ropes is not None
    grid = _grid_of(q, keys, dim, launch, scores, gpu, listing, is_plain=is_plain, is_latent=is_latent)
    if grid.tile.walk.groups:
        counters = None  # such programs do not merge
    if grid.is_listed:
        parts = q.new_empty(grid.num_tiles, q.shape[1], dim_v, dtype=torch.float32)
        result = _Result(parts, parts.new_empty(parts.shape[:2]), out, counters)
        _launch_kernel(result, q, keys, values, launch, plan, scores, grid, q_rope, ropes, gpu)
        return
    if grid.tile.walk.groups and grid.tiles is not None and not is_latent:
        places = plan.page_tables[0], launch.rows, grid.tiles
        scale = scores.scale * LOG2E.value
        launch_with_roles(out, q, (keys, values), places, launch.first, plan.page_size, scale, grid.tile, gpu)
        return
    if grid.splits == 1:
        result = _Result(out, out, None, None)
        _launch_kernel(result, q, keys, values, launch, plan, scores, grid, q_rope, ropes, gpu)
        return
    partials = q.new_empty(launch.num_queries, q.shape[1], grid.splits, dim_v, dtype=torch.float32)
    lse = q.new_empty(launch.num_queries, q.shape[1], grid.splits, dtype=torch.float32)
    result = _Result(partials, lse, None if counters is None else out, counters)
    _launch_kernel(result, q, keys, values, launch, plan, scores, grid, q_rope, ropes, gpu)
    if counters is not None:
        return
    block = min(next_power_of_2(dim_v, 16), MERGE_BLOCK)
    merge_splits_kernel[(launch.num_queries, q.shape[1], triton.cdiv(dim_v, block))](
        out,
        partials,
        lse,
        lse if scores.sinks is None else scores.sinks,
        grid.splits,
        HAS_SINKS=scores.sinks is not None,
        MOST=MAX_SPLITS,
        DV=dim_v,
        BLOCK=block,
    )


def _launch_latents(
    result: _Result,
    queries: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    launch: AttentionLaunch,
    plan: AttentionPlan,
    scores: Scores,
    grid: _Grid,
) -> None:
    places = plan.page_tables[0], launch.rows, grid.tiles
    shape, scale = (grid.num_tiles, grid.columns, grid.splits), scores.scale * LOG2E.value
    numbers = grid.heads, launch.first, plan.page_size, scale
    launch_latents_with_roles((result.out, result.lse), queries, caches, places, shape, *numbers, grid.tile)


def _launch_kernel(
    result: _Result,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    launch: AttentionLaunch,
    plan: AttentionPlan,
    scores: Scores,
    grid: _Grid,
    q_rope: Tensor | None,
    ropes: Tensor | None,
    gpu: Gpu,
) -> None:
    if grid.tile.walk.groups and q_rope is not None and ropes is not None:
        _launch_latents(result, (q, q_rope), (keys, ropes), launch, plan, scores, grid)
        return
    fp8, dot = cache_formats(keys.dtype, q.dtype, gpu)
    early = starts_early(gpu)
    caches = [x if not fp8 or x is None else x.view(torch.uint8) for x in (keys, values, ropes)]
    table, rows = plan.page_tables[-1 if scores.window else 0], launch.rows
    queries = q if q_rope is None else q_rope
    dims = (keys.shape[2], values.shape[2], 0 if ropes is None else ropes.shape[2])
    merged = result.out if result.merged is None else result.merged
    counters = rows if result.counters is None else result.counters
    arguments = as_arguments(caches, plan.page_size, grid.tile)
    pointers = (result.out, result.lse, merged, counters, q, queries, *arguments)
    optional = (rows if x is None else x for x in (grid.tiles, scores.sinks, scores.slopes))
    strides = (table.stride(0), q.stride(0), q.stride(1), queries.stride(0), queries.stride(1))
    paged_attention_kernel[(grid.num_tiles, grid.columns, grid.splits)](
        *pointers,
        table,
        rows,
        *optional,
        rows.stride(0),
        grid.num_tiles,
        launch.first,
        *strides,
        keys.stride(0),
        values.stride(0),
        0 if ropes is None else ropes.stride(0),
        scores.scale / scores.cap if scores.cap else scores.scale * LOG2E.value,
        scores.cap * LOG2E.value,
        GROUP=grid.group,
        HEADS=grid.heads,
        # a constant saves the decode kernel 35 registers
        KV_HEADS=0 if plan.page_size == ONE_PAGE else keys.shape[1],
        SPLIT=grid.splits > 1 or grid.is_listed,
        MERGES=result.merged is not None,
        TILED=grid.tiles is not None and not grid.is_listed,
        LISTED=grid.is_listed,
        WINDOW=scores.window,
        CAPPED=scores.cap > 0,
        HAS_SINKS=scores.sinks is not None,
        BIASED=scores.slopes is not None,
        LATENT=ropes is not None,
        PAGE=plan.page_size,
        M=grid.tile.m,
        N=grid.tile.n,
        DK=dims[0],
        DV=dims[1],
        DR=dims[2],
        BLOCK_K=next_power_of_2(dims[0], 16),
        BLOCK_V=next_power_of_2(dims[1], 16),
        BLOCK_R=next_power_of_2(dims[2], 16),
        FP8=fp8,
        DOT=dot,
        EARLY=early,
        **grid.tile.walk.constants,
        num_warps=grid.tile.warps,
        num_stages=grid.tile.stages,
        **launch_options(early=early),
    )
