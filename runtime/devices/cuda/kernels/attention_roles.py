"""Attention of prompts on Hopper in which warps have roles: one reads keys and values, and two or three
groups of four warps attend, each for 64 queries of the tile, without waiting for one another.

A group multiplies while it computes weights: values are summed by those of one tile of keys while it computes
those of the next, as in FlashAttention-3 (Shah et al., 2024). Tiles of keys are taken from the last to the
first, so that those that are masked come first; the last one ends where the row's keys end, and what lies
outside of its page is read as zeros (attention_keys.py says more of it).

A program computes one tile after the other where there are more tiles than programs; what it reads of the
next one is on its way while it computes. Programs take tiles of the list there and back, so that none has
the longest of each turn.

Every stage has two barriers: `full`, on which bytes arrive, and `empty`, on which groups arrive when they
have read them. Triton's interpreter does not know the language of this kernel (Gluon).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS: gl.constexpr = gl.constexpr(64)  # of a tile
DIM: gl.constexpr = gl.constexpr(128)
QUERIES: gl.constexpr = gl.constexpr(64)  # of a group
NEG_INF: gl.constexpr = gl.constexpr(float("-inf"))
FIRST: gl.constexpr = gl.constexpr(0)  # of the groups
SECOND: gl.constexpr = gl.constexpr(1)
THIRD: gl.constexpr = gl.constexpr(2)


class Stages(NamedTuple):
    """Tiles in shared memory [STAGES, 1, KEYS, DIM], and the barriers of each."""

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor
    values_full: gl.shared_memory_descriptor
    values_empty: gl.shared_memory_descriptor


class Lists(NamedTuple):
    """What says where rows and tiles are, see paged_attention_kernel."""

    tables: gl.tensor
    rows: gl.tensor
    tiles: gl.tensor
    num_rows: gl.tensor
    num_tiles: gl.tensor
    first_query: gl.tensor
    table_stride: gl.tensor


class Place(NamedTuple):
    """What a program computes at a time: the queries of a tile and of a KV head."""

    query: gl.tensor  # the first
    front: gl.tensor  # its position
    num_tokens: gl.tensor
    kv_head: gl.tensor
    part: gl.tensor  # of its query heads
    last: gl.tensor  # number of keys of the last query
    num_tiles: gl.tensor  # of keys
    table: gl.tensor  # of the row's pages


class Heads(NamedTuple):
    """Compile-time numbers of heads."""

    GROUP: gl.constexpr  # query heads of a KV head
    HEADS: gl.constexpr  # of them in a tile
    KV_HEADS: gl.constexpr
    COLUMNS: gl.constexpr  # KV heads * parts of a group


@gluon.jit
def _num_places(lists: Lists, heads: Heads) -> gl.tensor:
    """How many places this program computes."""
    total = lists.num_tiles * heads.COLUMNS
    turns, left = total // gl.num_programs(0), total % gl.num_programs(0)
    at = gl.where(turns % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
    return turns + gl.where(at < left, 1, 0)


@gluon.jit
def _place_of(lists: Lists, turn: gl.tensor, heads: Heads, M: gl.constexpr) -> Place:
    """What this program computes in a turn."""
    at = gl.where(turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
    at += turn * gl.num_programs(0)
    tile, column = at // heads.COLUMNS, at % heads.COLUMNS
    row, offset = gl.load(lists.tiles + tile), gl.load(lists.tiles + lists.num_tiles + tile)
    slot, start = gl.load(lists.rows + row), gl.load(lists.rows + lists.num_rows + row)
    tokens = gl.load(lists.rows + 2 * lists.num_rows + row) - offset
    query = gl.load(lists.rows + 3 * lists.num_rows + row) + offset - lists.first_query
    front, num_tokens = start + offset, gl.minimum(tokens, M // heads.HEADS)
    last = front + num_tokens
    num_tiles = gl.maximum((last + KEYS - 1) // KEYS, 1)
    table = lists.tables + slot.to(gl.int64) * lists.table_stride
    kv_head, part = column % heads.KV_HEADS, column // heads.KV_HEADS
    return Place(query, front, num_tokens, kv_head, part, last, num_tiles, table)


@gluon.jit
def _read(
    keys: tma.tensor_descriptor,
    values: tma.tensor_descriptor,
    stages: Stages,
    lists: Lists,
    heads: Heads,
    M: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Reads tiles of keys and values, the last one first, place after place."""
    n = gl.program_id(0) * 0  # tiles that have been read
    num_places = _num_places(lists, heads)
    place = _place_of(lists, 0, heads, M)
    for turn in range(num_places):
        following = _place_of(lists, gl.minimum(turn + 1, num_places - 1), heads, M)
        at, column = (place.num_tiles - 1) * KEYS, place.kv_head * DIM
        page = gl.load(place.table + at // PAGE, mask=at < place.last, other=0)
        for _ in range(place.num_tiles):
            # of the next tile, whose number is on its way while this tile waits for room
            next_page = gl.load(place.table + (at - KEYS) // PAGE, mask=at >= KEYS, other=0)
            token = at % PAGE + gl.minimum(at, place.last - KEYS) - at
            stage, phase = n % STAGES, (n // STAGES) & 1
            keys_full, values_full = stages.keys_full.index(stage), stages.values_full.index(stage)
            mbarrier.wait(stages.keys_empty.index(stage), phase ^ 1)
            mbarrier.expect(keys_full, keys.block_type.nbytes)
            tma.async_copy_global_to_shared(
                keys, [page, token, column], keys_full, stages.k_tiles.index(stage)
            )
            mbarrier.wait(stages.values_empty.index(stage), phase ^ 1)
            mbarrier.expect(values_full, values.block_type.nbytes)
            tma.async_copy_global_to_shared(
                values, [page, token, column], values_full, stages.v_tiles.index(stage)
            )
            at -= KEYS
            page = next_page
            n += 1
        place = following


@gluon.jit
def _start_scores(
    q_tile: gl.shared_memory_descriptor,
    stages: Stages,
    i: gl.tensor,
    SCORES: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tensor:
    """Starts the product of queries and the keys of tile i when these are there."""
    stage = i % STAGES
    mbarrier.wait(stages.keys_full.index(stage), (i // STAGES) & 1)
    k = stages.k_tiles.index(stage).reshape([KEYS, DIM]).permute((1, 0))
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, layout=SCORES)
    return warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(
    weights: gl.tensor, stages: Stages, acc: gl.tensor, i: gl.tensor, SUMS: gl.constexpr, STAGES: gl.constexpr
) -> gl.tensor:
    """Starts the product of weights and the values of tile i, added to `acc`, when these are there."""
    stage = i % STAGES
    operand = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
    mbarrier.wait(stages.values_full.index(stage), (i // STAGES) & 1)
    v = stages.v_tiles.index(stage).reshape([KEYS, DIM])
    return warpgroup_mma(operand, v, acc, is_async=True)


@gluon.jit
def _hide(
    scores: gl.tensor, positions: gl.tensor, at: gl.tensor, place: Place, SCORES: gl.constexpr
) -> gl.tensor:
    """Scores of the keys from `at`, -inf where a query at one of `positions` does not see a key."""
    if at + KEYS > place.front + 1:
        seen = gl.minimum(at, place.last - KEYS) + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        sees = (seen[None, :] <= positions[:, None]) & (seen >= at)[None, :]
        scores = gl.where(sees, scores, NEG_INF)
    return scores


@gluon.jit
def _weigh(scores: gl.tensor, row_max: gl.tensor, row_sum: gl.tensor, scale: gl.tensor) -> tuple:
    """Weights of scores; the maximum and sum of each row with them, and the factor of what was summed
    before."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    base = gl.where(new_max == NEG_INF, 0.0, new_max)
    weights = gl.exp2(scores * scale - base[:, None])
    rescale = gl.exp2(row_max - base)
    return weights, new_max, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _walk(
    q_tile: gl.shared_memory_descriptor,
    stages: Stages,
    place: Place,
    n: gl.tensor,
    positions: gl.tensor,
    scale: gl.tensor,
    SCORES: gl.constexpr,
    SUMS: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tensor:
    """The result [QUERIES, DIM] of a group's queries at `positions`; `n` tiles have been read for others."""
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    row_max = gl.full([QUERIES], NEG_INF, gl.float32, layout=ROWS)
    row_sum = gl.zeros([QUERIES], gl.float32, layout=ROWS)
    acc = gl.zeros([QUERIES, DIM], gl.float32, layout=SUMS)
    at, end = (place.num_tiles - 1) * KEYS, n + place.num_tiles - 1
    started = _start_scores(q_tile, stages, n, SCORES, STAGES)
    scores = _hide(warpgroup_mma_wait(0, [started]), positions, at, place, SCORES)
    mbarrier.arrive(stages.keys_empty.index(n % STAGES), count=1)
    weights, row_max, row_sum, rescale = _weigh(scores, row_max, row_sum, scale)
    for i in range(n, end):
        started = _start_scores(q_tile, stages, i + 1, SCORES, STAGES)
        adding = _start_sums(weights, stages, acc, i, SUMS, STAGES)
        scores = warpgroup_mma_wait(1, [started])
        mbarrier.arrive(stages.keys_empty.index((i + 1) % STAGES), count=1)
        at -= KEYS
        scores = _hide(scores, positions, at, place, SCORES)
        weights, row_max, row_sum, rescale = _weigh(scores, row_max, row_sum, scale)
        acc = warpgroup_mma_wait(0, [adding])
        mbarrier.arrive(stages.values_empty.index(i % STAGES), count=1)
        acc = acc * gl.convert_layout(rescale, SUM_ROWS)[:, None]
    adding = _start_sums(weights, stages, acc, end, SUMS, STAGES)
    acc = warpgroup_mma_wait(0, [adding])
    mbarrier.arrive(stages.values_empty.index(end % STAGES), count=1)
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    return acc / gl.convert_layout(divisor, SUM_ROWS)[:, None]


@gluon.jit
def _rows_of(place: Place, heads: Heads, M: gl.constexpr, INDEX: gl.constexpr, LAYOUT: gl.constexpr) -> tuple:
    """For each query of a group, its token among the program's, its query head, and whether there is one."""
    index = INDEX * QUERIES + gl.arange(0, QUERIES, layout=LAYOUT)
    token, member = index // heads.HEADS, place.part * heads.HEADS + index % heads.HEADS
    is_query = (token < place.num_tokens) & (token < M // heads.HEADS) & (member < heads.GROUP)
    return token, place.kv_head * heads.GROUP + member, is_query


@gluon.jit
def _attend(
    out: gl.tensor,
    q: gl.tensor,
    stages: Stages,
    lists: Lists,
    q_stride: gl.tensor,
    q_head_stride: gl.tensor,
    scale: gl.tensor,
    heads: Heads,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    INDEX: gl.constexpr,
) -> None:
    """Attends with the queries of one group of warps, and stores results, place after place."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, DIM], gl.bfloat16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [QUERIES, DIM], TILE)
    n = gl.program_id(0) * 0  # tiles of keys that have been read
    num_places = _num_places(lists, heads)
    place = _place_of(lists, 0, heads, M)
    for turn in range(num_places):
        following = _place_of(lists, gl.minimum(turn + 1, num_places - 1), heads, M)
        token, head, is_query = _rows_of(place, heads, M, INDEX, gl.SliceLayout(1, READ))
        at = (place.query + token).to(gl.int64) * q_stride + head * q_head_stride
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, READ))
        q_tile.store(gl.load(q + at[:, None] + dims[None, :], mask=is_query[:, None], other=0.0))
        fence_async_shared()
        token, head, is_query = _rows_of(place, heads, M, INDEX, gl.SliceLayout(1, SCORES))
        positions = place.front + gl.minimum(token, place.num_tokens - 1)
        found = _walk(q_tile, stages, place, n, positions, scale, SCORES, SUMS, STAGES)
        token, head, is_query = _rows_of(place, heads, M, INDEX, gl.SliceLayout(1, SUMS))
        to = ((place.query + token).to(gl.int64) * (heads.KV_HEADS * heads.GROUP) + head) * DIM
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUMS))
        gl.store(out + to[:, None] + dims[None, :], found.to(gl.bfloat16), mask=is_query[:, None])
        n += place.num_tiles
        place = following


@gluon.jit
def _stages(
    keys: tma.tensor_descriptor, values: tma.tensor_descriptor, GROUPS: gl.constexpr, STAGES: gl.constexpr
) -> Stages:
    """Shared memory of a program, with barriers that nothing has arrived on."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, DIM], keys.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, DIM], values.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    fence_async_shared()
    return Stages(k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)


@gluon.jit(
    do_not_specialize=["num_rows", "num_tiles", "first_query"],
    do_not_specialize_on_alignment=["tables", "rows", "tiles"],
)
def prompt_attention_kernel(
    out: gl.tensor,
    q: gl.tensor,
    keys: tma.tensor_descriptor,
    values: tma.tensor_descriptor,
    tables: gl.tensor,
    rows: gl.tensor,
    tiles: gl.tensor,
    num_rows: gl.tensor,
    num_tiles: gl.tensor,
    first_query: gl.tensor,
    table_stride: gl.tensor,
    q_stride: gl.tensor,
    q_head_stride: gl.tensor,
    scale: gl.tensor,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Grid (programs), at most as many as there are tiles * KV heads * parts of a group. `keys` and `values`
    are descriptors of [pages, PAGE, KV heads * DIM] in blocks of [1, KEYS, DIM]; the other arguments are
    those of paged_attention_kernel, for tiles of GROUPS * QUERIES queries."""
    M: gl.constexpr = GROUPS * QUERIES
    heads: gl.constexpr = Heads(GROUP, HEADS, KV_HEADS, KV_HEADS * ((GROUP + HEADS - 1) // HEADS))
    lists = Lists(tables, rows, tiles, num_rows, num_tiles, first_query, table_stride)
    stages = _stages(keys, values, GROUPS, STAGES)
    reading = (keys, values, stages, lists, heads, M, PAGE, STAGES)
    first = (out, q, stages, lists, q_stride, q_head_stride, scale, heads, M, STAGES, FIRST)
    second = (out, q, stages, lists, q_stride, q_head_stride, scale, heads, M, STAGES, SECOND)
    third = (out, q, stages, lists, q_stride, q_head_stride, scale, heads, M, STAGES, THIRD)
    if GROUPS == 2:
        gl.warp_specialize([(_attend, first), (_attend, second), (_read, reading)], [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(_attend, first), (_attend, second), (_attend, third), (_read, reading)],
            [4, 4, 1],
            [160, 160, 24],
        )
