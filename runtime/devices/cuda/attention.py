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
import triton.language as tl
from torch import Tensor
from triton import knobs

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.kernels.attention import paged_attention_kernel
from runtime.devices.cuda.kernels.attention_splits import LOG2E, merge_splits_kernel
from runtime.devices.cuda.kernels.launch import FP8_KINDS, INTERPRETER, Gpu, dot_type, next_power_of_2
from runtime.layers.upload import upload

FILL = 3  # programs per multiprocessor below which keys are split
MERGE_BLOCK = 512  # numbers of a result that a program of merge_splits_kernel computes
MAX_SPLITS = 128
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


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share."""

    launches: tuple[AttentionLaunch, ...]
    page_tables: Tensor  # int32 [pools, max_slots, pages]
    page_size: int
    # first query -> launch of that row alone, filled when a layer first needs it (MLA)
    row_launches: dict[int, AttentionLaunch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program: queries, keys at a time, warps, and stages of the pipeline that reads keys."""

    m: int
    n: int
    warps: int
    stages: int


def plan_attention(plan: AttentionRows, page_tables: Tensor, page_size: int) -> AttentionPlan:
    """The plan of a step, with one copy to the device for all rows."""
    starts, counts = plan.starts.astype(np.int32), plan.counts.astype(np.int32)
    queries = np.cumsum(counts, dtype=np.int32) - counts
    rows = upload(np.stack((plan.slots.astype(np.int32), starts, counts, queries)), page_tables.device)
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


def list_query_tiles(ends: np.ndarray, tokens: int) -> np.ndarray:
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


def select_tile(tile_queries: int, dim: int, itemsize: int, gpu: Gpu) -> Tile:
    """Sizes for tiles of at most `tile_queries` queries, chosen by what the compiler reports of registers and
    shared memory (tests/devices/cuda/ahead.py).

    Page ids take every second stage of the pipeline, so five stages hold two tiles of keys and values, three
    hold one.
    """
    if gpu == INTERPRETER:
        return Tile(min(next_power_of_2(tile_queries, 16), 64), 128, 4, 1)
    is_large = gpu.shared_bytes >= 200 << 10  # else three quarters of a hundred KiB must do
    stages = 5 if is_large else 3
    if itemsize == 4:
        return Tile(
            16 if tile_queries <= 16 or dim > 128 else 32,
            32 if dim <= 128 else 16,
            4,
            3 if tile_queries <= 16 and is_large else 2,
        )
    if dim > 256:  # latents
        return (
            Tile(16, 32, 4, stages if is_large else 2)
            if tile_queries <= 16 or not is_large
            else Tile(64, 32, 8, stages)
        )
    if tile_queries <= 32:
        return Tile(
            next_power_of_2(tile_queries, 16), 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, stages
        )
    if not is_large:
        return Tile(64, 64 if dim <= 128 else 32, 4, 3 if dim <= 128 else 2)
    return (
        Tile(128, 64 if dim <= 128 else 32, 8, stages)
        if tile_queries > 64
        else Tile(64, 64 if dim <= 128 else 32, 4, stages)
    )


def select_splits(num_programs: int, max_kv_len: int, tile: Tile, gpu: Gpu) -> int:
    """The number of splits of the keys: a power of two, so that programs fill the GPU and each of them has at
    least four tiles."""
    wanted = FILL * gpu.num_cores // max(1, num_programs)
    return 1 << max(0, min(wanted, max_kv_len // (4 * tile.n), MAX_SPLITS).bit_length() - 1)


def cache_formats(kv_dtype: torch.dtype, dtype: torch.dtype, gpu: Gpu) -> tuple[str, tl.dtype]:
    """How a kernel reads caches of `kv_dtype` ("" for a cache in the dtype of queries, else as from_fp8), and
    the dtype of its products with queries of `dtype`.

    8-bit floats become float16, which holds each of them exactly, and so are products where queries have 16
    bits: a product of bfloat16 numbers would take another conversion of every key and value.
    """
    kind = FP8_KINDS.get(kv_dtype, "")
    if kind and dtype == torch.bfloat16 and gpu != INTERPRETER and not knobs.runtime.interpret:
        return "native" if kind == "e4m3" and gpu.has_fp8 else kind, tl.float16
    return kind, dot_type(dtype)


def split_counters(gpu: Gpu, torch_device: torch.device) -> Tensor:
    """What programs of one launch count themselves by, where the last one merges splits: as many numbers as
    programs without splits are split at all. They are 0 between launches."""
    return torch.zeros(FILL * gpu.num_cores, dtype=torch.int32, device=torch_device)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scores: Scores,
    gpu: Gpu,
    counters: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, DK] over caches [tokens, K, DK] and [tokens, K, DV] -> [T, H, DV]. `counters`: of
    `split_counters`; None: splits are merged in a launch of their own."""
    out = q.new_empty(*q.shape[:2], v_cache.shape[2])
    for launch in plan.launches:
        queries = launch.queries
        launch_attention(
            out[queries], q[queries], k_cache, v_cache, launch, plan, scores, gpu, counters=counters
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


class _Result(NamedTuple):
    """What a launch writes: `out` and `lse` as paged_attention_kernel says; `merged` None: nothing merges."""

    out: Tensor
    lse: Tensor
    merged: Tensor | None
    counters: Tensor | None


def _grid_of(q: Tensor, keys: Tensor, dim: int, launch: AttentionLaunch, window: int, gpu: Gpu) -> _Grid:
    kv_heads = keys.shape[1]
    group = q.shape[1] // kv_heads
    max_queries = 1 if launch.ends is None else int(launch.ends[1].max())
    tile = select_tile(max_queries * group, dim, q.itemsize, gpu)
    heads = min(group, tile.m)
    tiles = None if launch.ends is None else launch.tiles_of(tile.m // heads)
    num_tiles = launch.num_queries if tiles is None else tiles.shape[1]
    columns = kv_heads * triton.cdiv(group, heads)
    max_kv_len = min(launch.max_kv_len, window or launch.max_kv_len)
    splits = select_splits(num_tiles * columns, max_kv_len, tile, gpu)
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
) -> None:
    """Attention of the queries of one launch, q [n, H, DK] -> out [n, H, DV], written in place. `counters`:
    see `attention`.

    With `ropes`, keys have a second part in another cache, [tokens, 1, P], for which queries have q_rope
    [n, H, P], and the first part of keys is the values (absorbed MLA).
    """
    dim_v = values.shape[2]
    grid = _grid_of(q, keys, max(keys.shape[2], dim_v), launch, scores.window, gpu)
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
    fp8, dot = cache_formats(keys.dtype, q.dtype, gpu)
    caches = [x if not fp8 or x is None else x.view(torch.uint8) for x in (keys, values, ropes)]
    table, rows, queries = (
        plan.page_tables[-1 if scores.window else 0],
        launch.rows,
        q if q_rope is None else q_rope,
    )
    dims = (keys.shape[2], values.shape[2], 0 if ropes is None else ropes.shape[2])
    blocks = [next_power_of_2(dim, 16) for dim in dims]
    merged = result.out if result.merged is None else result.merged
    counters = rows if result.counters is None else result.counters
    inputs = (q, queries, caches[0], caches[1], caches[0] if caches[2] is None else caches[2])
    pointers = (result.out, result.lse, merged, counters, *inputs)
    lists = (
        table,
        rows,
        rows if grid.tiles is None else grid.tiles,
        rows if scores.sinks is None else scores.sinks,
        rows if scores.slopes is None else scores.slopes,
    )
    strides = (table.stride(0), q.stride(0), q.stride(1), queries.stride(0), queries.stride(1))
    paged_attention_kernel[(grid.num_tiles, grid.columns, grid.splits)](
        *pointers,
        *lists,
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
        SPLIT=grid.splits > 1,
        MERGES=result.merged is not None,
        TILED=grid.tiles is not None,
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
        BLOCK_K=blocks[0],
        BLOCK_V=blocks[1],
        BLOCK_R=blocks[2],
        FP8=fp8,
        DOT=dot,
        num_warps=grid.tile.warps,
        num_stages=grid.tile.stages,
    )
