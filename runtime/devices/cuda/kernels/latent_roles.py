"""Absorbed latent attention (MLA) on Hopper in which warps have roles: one reads latents and rotary parts,
one group of four warps computes the weights of 64 queries, and it and a second group sum half of the latents
each.

The sums of 64 queries are 64 x 512 numbers: as much as two groups hold without spilling, and more than one
can. So the first group multiplies queries and keys, and hands weights and the factors of what was summed
before to the second one, through shared memory: each product is computed once. It sums the values of one tile
of keys while it weighs those of the next (attention_roles.py says more of that, and of the last tile of a
row). FlashMLA (DeepSeek, 2025) halves the sums likewise; there both groups weigh, in turns.

Every stage has the left and the right half of latents with a barrier `full` and a barrier `empty` for each:
the group that sums a half gives it back. Rotary parts go with the left one.
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

from runtime.devices.cuda.kernels.attention_roles import KEYS, NEG_INF, QUERIES, _weigh

HALF: gl.constexpr = gl.constexpr(256)  # of the latents
ROPE: gl.constexpr = gl.constexpr(64)
LEFT: gl.constexpr = gl.constexpr(0)
RIGHT: gl.constexpr = gl.constexpr(256)  # first number of that half


class Stages(NamedTuple):
    """Tiles of keys in shared memory, [STAGES, 1, KEYS, HALF] and [STAGES, 1, KEYS, ROPE], and the barriers
    of each."""

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    ropes: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    left_empty: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor


class Shared(NamedTuple):
    """Weights [QUERIES, KEYS] and factors float32 [QUERIES] that the first group hands to the second one."""

    weights: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


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
    """The queries of a program, and its part of their keys."""

    query: gl.tensor  # the first
    front: gl.tensor  # its position
    num_tokens: gl.tensor
    last: gl.tensor  # number of keys of the last query
    begin: gl.tensor  # first key of the program's part
    num_tiles: gl.tensor  # of keys
    table: gl.tensor  # of the row's pages


class Heads(NamedTuple):
    """Compile-time numbers of query heads, and what programs have."""

    GROUP: gl.constexpr
    HEADS: gl.constexpr  # of them in a tile
    TILED: gl.constexpr
    SPLIT: gl.constexpr


class Target(NamedTuple):
    """Results."""

    out: gl.tensor
    lse: gl.tensor


class Queries(NamedTuple):
    """Where queries are, and the distances of tokens and of heads."""

    pointer: gl.tensor
    stride: gl.tensor
    head_stride: gl.tensor


class QueryTiles(NamedTuple):
    """The program's queries in shared memory: halves [QUERIES, HALF], and rotary parts [QUERIES, ROPE]."""

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    ropes: gl.shared_memory_descriptor


@gluon.jit
def _place_of(lists: Lists, heads: Heads) -> Place:
    """What this program computes: at least one tile of keys, which may have none that is seen."""
    row, offset = gl.program_id(0), gl.program_id(0) * 0
    if heads.TILED:
        row, offset = gl.load(lists.tiles + row), gl.load(lists.tiles + lists.num_tiles + row)
    slot, start = gl.load(lists.rows + row), gl.load(lists.rows + lists.num_rows + row)
    tokens = gl.load(lists.rows + 2 * lists.num_rows + row) - offset
    query = gl.load(lists.rows + 3 * lists.num_rows + row) + offset - lists.first_query
    num_tokens = gl.minimum(tokens, QUERIES // heads.HEADS)
    last = gl.where(num_tokens > 0, start + offset + num_tokens, 0)
    total = (last + KEYS - 1) // KEYS
    size = (total + gl.num_programs(2) - 1) // gl.num_programs(2)
    first = gl.program_id(2) * size
    num_tiles = gl.maximum(gl.minimum(size, total - first), 1)
    table = lists.tables + slot.to(gl.int64) * lists.table_stride
    return Place(query, start + offset, num_tokens, last, first * KEYS, num_tiles, table)


@gluon.jit
def _read(
    latents: tma.tensor_descriptor,
    ropes: tma.tensor_descriptor,
    stages: Stages,
    lists: Lists,
    heads: Heads,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Reads the tiles of the program's part, the last one first."""
    place = _place_of(lists, heads)
    at = place.begin + (place.num_tiles - 1) * KEYS
    page = gl.load(place.table + at // PAGE, mask=at < place.last, other=0)
    for n in range(place.num_tiles):
        next_page = gl.load(place.table + (at - KEYS) // PAGE, mask=at >= KEYS, other=0)
        # what no query sees is zeros from before the page
        token = gl.where(at < place.last, at % PAGE + gl.minimum(at, place.last - KEYS) - at, -KEYS)
        stage, phase = n % STAGES, (n // STAGES) & 1
        left_full, right_full = stages.left_full.index(stage), stages.right_full.index(stage)
        mbarrier.wait(stages.left_empty.index(stage), phase ^ 1)
        mbarrier.expect(left_full, latents.block_type.nbytes + ropes.block_type.nbytes)
        tma.async_copy_global_to_shared(latents, [page, token, LEFT], left_full, stages.left.index(stage))
        tma.async_copy_global_to_shared(ropes, [page, token, LEFT], left_full, stages.ropes.index(stage))
        mbarrier.wait(stages.right_empty.index(stage), phase ^ 1)
        mbarrier.expect(right_full, latents.block_type.nbytes)
        tma.async_copy_global_to_shared(latents, [page, token, RIGHT], right_full, stages.right.index(stage))
        at -= KEYS
        page = next_page


@gluon.jit
def _start_scores(
    q_tiles: QueryTiles, stages: Stages, i: gl.tensor, SCORES: gl.constexpr, STAGES: gl.constexpr
) -> gl.tensor:
    """Starts the product of queries and the keys of tile i when these are there."""
    stage, phase = i % STAGES, (i // STAGES) & 1
    left = stages.left.index(stage).reshape([KEYS, HALF]).permute((1, 0))
    right = stages.right.index(stage).reshape([KEYS, HALF]).permute((1, 0))
    ropes = stages.ropes.index(stage).reshape([KEYS, ROPE]).permute((1, 0))
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, layout=SCORES)
    mbarrier.wait(stages.left_full.index(stage), phase)
    started = warpgroup_mma(q_tiles.left, left, zeros, use_acc=False, is_async=True)
    started = warpgroup_mma(q_tiles.ropes, ropes, started, is_async=True)
    mbarrier.wait(stages.right_full.index(stage), phase)
    return warpgroup_mma(q_tiles.right, right, started, is_async=True)


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
def _hand_over(weights: gl.tensor, factors: gl.tensor, shared: Shared, n: gl.tensor) -> None:
    """Gives weights and factors, the n-th ones, to the second group when it has read those before."""
    mbarrier.wait(shared.empty, (n & 1) ^ 1)
    shared.weights.store(weights.to(gl.bfloat16))
    shared.factors.store(factors)
    fence_async_shared()
    mbarrier.arrive(shared.full, count=1)


@gluon.jit
def _rows_of(place: Place, heads: Heads, LAYOUT: gl.constexpr) -> tuple:
    """For each query, its token among the program's, its head, and whether there is one."""
    index = gl.arange(0, QUERIES, layout=LAYOUT)
    token, head = index // heads.HEADS, gl.program_id(1) * heads.HEADS + index % heads.HEADS
    is_query = (token < gl.maximum(place.num_tokens, 1)) & (token < QUERIES // heads.HEADS)
    return token, head, is_query & (head < heads.GROUP)


@gluon.jit
def _store(
    target: Target, found: gl.tensor, place: Place, heads: Heads, FIRST: gl.constexpr, SUMS: gl.constexpr
) -> None:
    """Stores half of each query's result, from number FIRST on."""
    token, head, is_query = _rows_of(place, heads, gl.SliceLayout(1, SUMS))
    to = (place.query + token).to(gl.int64) * heads.GROUP + head
    if heads.SPLIT:
        to = to * gl.num_programs(2) + gl.program_id(2)
    dims = FIRST + gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
    at = to[:, None] * (2 * HALF) + dims[None, :]
    gl.store(target.out + at, found.to(target.out.dtype.element_ty), mask=is_query[:, None])


@gluon.jit
def _load_queries(
    q: Queries, place: Place, heads: Heads, FIRST: gl.constexpr, WIDTH: gl.constexpr
) -> gl.shared_memory_descriptor:
    """[QUERIES, WIDTH] of q from number FIRST of each query on, in shared memory."""
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, WIDTH], gl.bfloat16)
    tile = gl.allocate_shared_memory(gl.bfloat16, [QUERIES, WIDTH], TILE)
    token, head, is_query = _rows_of(place, heads, gl.SliceLayout(1, READ))
    at = (place.query + token).to(gl.int64) * q.stride + head * q.head_stride
    dims = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, READ))
    tile.store(gl.load(q.pointer + at[:, None] + dims[None, :], mask=is_query[:, None], other=0.0))
    return tile


@gluon.jit
def _weigh_and_sum(
    target: Target,
    q: Queries,
    q_rope: Queries,
    stages: Stages,
    shared: Shared,
    lists: Lists,
    scale: gl.tensor,
    heads: Heads,
    STAGES: gl.constexpr,
) -> None:
    """The first group: weights of all keys, and the left half of sums."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    place = _place_of(lists, heads)
    q_left = _load_queries(q, place, heads, LEFT, HALF)
    q_right = _load_queries(q, place, heads, RIGHT, HALF)
    q_tiles = QueryTiles(q_left, q_right, _load_queries(q_rope, place, heads, LEFT, ROPE))
    fence_async_shared()
    token, head, is_query = _rows_of(place, heads, ROWS)
    positions = gl.minimum(place.front + token, place.last - 1)
    row_max = gl.full([QUERIES], NEG_INF, gl.float32, layout=ROWS)
    row_sum = gl.zeros([QUERIES], gl.float32, layout=ROWS)
    acc = gl.zeros([QUERIES, HALF], gl.float32, layout=SUMS)
    end = place.num_tiles - 1
    at = place.begin + end * KEYS
    started = _start_scores(q_tiles, stages, end * 0, SCORES, STAGES)
    scores = _hide(warpgroup_mma_wait(0, [started]), positions, at, place, SCORES)
    weights, row_max, row_sum, rescale = _weigh(scores, row_max, row_sum, scale)
    for i in range(end):
        _hand_over(weights, rescale, shared, i)
        started = _start_scores(q_tiles, stages, i + 1, SCORES, STAGES)
        values = stages.left.index(i % STAGES).reshape([KEYS, HALF])
        operand = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
        adding = warpgroup_mma(operand, values, acc, is_async=True)
        at -= KEYS
        scores = _hide(warpgroup_mma_wait(1, [started]), positions, at, place, SCORES)
        weights, row_max, row_sum, rescale = _weigh(scores, row_max, row_sum, scale)
        acc = warpgroup_mma_wait(0, [adding])
        mbarrier.arrive(stages.left_empty.index(i % STAGES), count=1)
        acc = acc * gl.convert_layout(rescale, SUM_ROWS)[:, None]
    _hand_over(weights, rescale, shared, end)
    values = stages.left.index(end % STAGES).reshape([KEYS, HALF])
    operand = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
    acc = warpgroup_mma_wait(0, [warpgroup_mma(operand, values, acc, is_async=True)])
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    _hand_over(weights, divisor, shared, end + 1)
    if heads.SPLIT:
        to = ((place.query + token).to(gl.int64) * heads.GROUP + head) * gl.num_programs(2)
        sums = gl.where(row_sum == 0.0, NEG_INF, row_max + gl.log2(divisor))
        gl.store(target.lse + to + gl.program_id(2), sums, mask=is_query)
    found = acc / gl.convert_layout(divisor, SUM_ROWS)[:, None]
    _store(target, found, place, heads, LEFT, SUMS)


@gluon.jit
def _sum(
    target: Target, stages: Stages, shared: Shared, lists: Lists, heads: Heads, STAGES: gl.constexpr
) -> None:
    """The second group: the right half of sums."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    place = _place_of(lists, heads)
    acc = gl.zeros([QUERIES, HALF], gl.float32, layout=SUMS)
    for i in range(place.num_tiles):
        stage = i % STAGES
        values = stages.right.index(stage).reshape([KEYS, HALF])
        mbarrier.wait(stages.right_full.index(stage), (i // STAGES) & 1)
        mbarrier.wait(shared.full, i & 1)
        acc = acc * shared.factors.load(SUM_ROWS)[:, None]
        acc = warpgroup_mma_wait(0, [warpgroup_mma(shared.weights, values, acc, is_async=True)])
        mbarrier.arrive(shared.empty, count=1)
        mbarrier.arrive(stages.right_empty.index(stage), count=1)
    mbarrier.wait(shared.full, place.num_tiles & 1)
    found = acc / shared.factors.load(SUM_ROWS)[:, None]
    _store(target, found, place, heads, RIGHT, SUMS)


@gluon.jit
def _barriers(COUNT: gl.constexpr) -> gl.shared_memory_descriptor:
    """COUNT barriers that one group arrives on."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(COUNT):
        mbarrier.init(made.index(stage), count=1)
    return made


@gluon.jit
def _stages(latents: tma.tensor_descriptor, ropes: tma.tensor_descriptor, STAGES: gl.constexpr) -> Stages:
    """Shared memory of a program, with barriers that nothing has arrived on."""
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, HALF], latents.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, HALF], latents.layout)
    rotary = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, ROPE], ropes.layout)
    left_full, left_empty = _barriers(STAGES), _barriers(STAGES)
    right_full, right_empty = _barriers(STAGES), _barriers(STAGES)
    return Stages(left, right, rotary, left_full, left_empty, right_full, right_empty)


@gluon.jit
def _shared() -> Shared:
    """What both groups share."""
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, KEYS], gl.bfloat16)
    FACTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = gl.allocate_shared_memory(gl.bfloat16, [QUERIES, KEYS], WEIGHTS)
    factors = gl.allocate_shared_memory(gl.float32, [QUERIES], FACTORS)
    return Shared(weights, factors, _barriers(1).index(0), _barriers(1).index(0))


@gluon.jit(
    do_not_specialize=["num_rows", "num_tiles", "first_query"],
    do_not_specialize_on_alignment=["tables", "rows", "tiles"],
)
def latent_attention_kernel(
    out: gl.tensor,
    lse: gl.tensor,
    q: gl.tensor,
    q_rope: gl.tensor,
    latents: tma.tensor_descriptor,
    ropes: tma.tensor_descriptor,
    tables: gl.tensor,
    rows: gl.tensor,
    tiles: gl.tensor,
    num_rows: gl.tensor,
    num_tiles: gl.tensor,
    first_query: gl.tensor,
    table_stride: gl.tensor,
    q_stride: gl.tensor,
    q_head_stride: gl.tensor,
    rope_q_stride: gl.tensor,
    rope_q_head_stride: gl.tensor,
    scale: gl.tensor,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    TILED: gl.constexpr,
    SPLIT: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Grid (tiles, parts of the heads, splits). `latents` and `ropes` are descriptors of [pages, PAGE, 2 *
    HALF] and [pages, PAGE, ROPE] in blocks of [1, KEYS, HALF] and [1, KEYS, ROPE]; the other arguments are
    those of paged_attention_kernel, for tiles of QUERIES queries."""
    heads: gl.constexpr = Heads(GROUP, HEADS, TILED, SPLIT)
    lists = Lists(tables, rows, tiles, num_rows, num_tiles, first_query, table_stride)
    target = Target(out, lse)
    stages, shared = _stages(latents, ropes, STAGES), _shared()
    fence_async_shared()
    queries = Queries(q, q_stride, q_head_stride)
    rotary = Queries(q_rope, rope_q_stride, rope_q_head_stride)
    first = (target, queries, rotary, stages, shared, lists, scale, heads, STAGES)
    second = (target, stages, shared, lists, heads, STAGES)
    reading = (latents, ropes, stages, lists, heads, PAGE, STAGES)
    gl.warp_specialize([(_weigh_and_sum, first), (_sum, second), (_read, reading)], [4, 1], [240, 24])
