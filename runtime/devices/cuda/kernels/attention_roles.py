"""Attention of prompts on Hopper in which warps have roles: one reads keys and values, and two or three groups
of four warps attend, each for 64 queries of the tile, without waiting for one another.

A group multiplies while it computes weights: values are summed with those of one tile of keys while it computes
those of the next, as in FlashAttention-3 (Shah et al., 2024). Tiles of
keys are taken from the last to the first, so that those that are masked come first; the last one ends where
the row's keys end, and what lies outside of its page is read as zeros (attention_keys.py says more of it).

Every stage has two barriers: `full`, on which bytes arrive, and `empty`, on which groups arrive when they have
read them. Triton's interpreter does not know the language of this kernel (Gluon).
"""

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
GROUP_QUERIES: gl.constexpr = gl.constexpr(64)  # of four warps
NEG_INF: gl.constexpr = gl.constexpr(float("-inf"))
FIRST: gl.constexpr = gl.constexpr(0)  # of the groups
SECOND: gl.constexpr = gl.constexpr(1)
THIRD: gl.constexpr = gl.constexpr(2)


@gluon.jit
def _read(keys, values, tiles, table, column, last, count, PAGE: gl.constexpr, STAGES: gl.constexpr):
    """Reads tiles of keys and values, the last one first."""
    k_tiles, v_tiles, barriers = tiles
    k_full, k_empty, v_full, v_empty = barriers
    at = (count - 1) * KEYS
    page = gl.load(table + at // PAGE, mask=at < last, other=0)
    for i in range(count):
        # of the next tile, whose number is on its way while this tile waits for room
        next_page = gl.load(table + (at - KEYS) // PAGE, mask=at >= KEYS, other=0)
        token = at % PAGE + gl.minimum(at, last - KEYS) - at
        stage, turn = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), turn ^ 1)
        mbarrier.expect(k_full.index(stage), keys.block_type.nbytes)
        tma.async_copy_global_to_shared(
            keys, [page, token, column], k_full.index(stage), k_tiles.index(stage)
        )
        mbarrier.wait(v_empty.index(stage), turn ^ 1)
        mbarrier.expect(v_full.index(stage), values.block_type.nbytes)
        tma.async_copy_global_to_shared(
            values, [page, token, column], v_full.index(stage), v_tiles.index(stage)
        )
        at -= KEYS
        page = next_page


@gluon.jit
def _start_scores(q_tile, k_tiles, k_full, i, SCORES: gl.constexpr, STAGES: gl.constexpr):
    """Starts the product of queries and the keys of tile i when these are there."""
    stage = i % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    k = k_tiles.index(stage).reshape([KEYS, DIM]).permute((1, 0))
    zeros = gl.zeros([GROUP_QUERIES, KEYS], gl.float32, layout=SCORES)
    return warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(operand, v_tiles, v_full, acc, i, STAGES: gl.constexpr):
    """Starts the product of weights and the values of tile i, added to `acc`, when these are there."""
    stage = i % STAGES
    mbarrier.wait(v_full.index(stage), (i // STAGES) & 1)
    v = v_tiles.index(stage).reshape([KEYS, DIM])
    return warpgroup_mma(operand, v, acc, is_async=True)


@gluon.jit
def _hide(scores, positions, at, front, last, SCORES: gl.constexpr):
    """Scores of the keys from `at`, -inf where a query at one of `positions` does not see a key."""
    if at + KEYS > front + 1:
        seen = gl.minimum(at, last - KEYS) + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        sees = (seen[None, :] <= positions[:, None]) & (seen >= at)[None, :]
        scores = gl.where(sees, scores, NEG_INF)
    return scores


@gluon.jit
def _weigh(scores, row_max, row_sum, scale):
    """Weights of scores; the maximum and sum of each row with them, and the factor of what was summed
    before."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    base = gl.where(new_max == NEG_INF, 0.0, new_max)
    weights = gl.exp2(scores * scale - base[:, None])
    rescale = gl.exp2(row_max - base)
    return weights, new_max, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _attend(
    out, q, tiles, place, strides, last, count, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, INDEX: gl.constexpr,
):
    """Attends to all tiles with the queries of one group of warps, and stores the result."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_QUERIES, DIM], gl.bfloat16)
    k_tiles, v_tiles, barriers = tiles
    k_full, k_empty, v_full, v_empty = barriers
    query, kv_head, part, front, num_tokens = place
    q_stride, q_head_stride = strides

    index = INDEX * GROUP_QUERIES + gl.arange(0, GROUP_QUERIES, layout=gl.SliceLayout(1, READ))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, READ))
    token, member = index // HEADS, part * HEADS + index % HEADS
    is_query = (token < num_tokens) & (token < M // HEADS) & (member < GROUP)
    from_q = (query + token).to(gl.int64) * q_stride + (kv_head * GROUP + member) * q_head_stride
    x = gl.load(q + from_q[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [GROUP_QUERIES, DIM], TILE, x)
    fence_async_shared()

    positions = front + gl.minimum(
        (INDEX * GROUP_QUERIES + gl.arange(0, GROUP_QUERIES, layout=ROWS)) // HEADS, num_tokens - 1
    )
    row_max = gl.full([GROUP_QUERIES], NEG_INF, gl.float32, layout=ROWS)
    row_sum = gl.zeros([GROUP_QUERIES], gl.float32, layout=ROWS)
    acc = gl.zeros([GROUP_QUERIES, DIM], gl.float32, layout=SUMS)
    started = _start_scores(q_tile, k_tiles, k_full, 0, SCORES, STAGES)
    scores = warpgroup_mma_wait(0, [started])
    mbarrier.arrive(k_empty.index(0), count=1)
    at = (count - 1) * KEYS
    scores = _hide(scores, positions, at, front, last, SCORES)
    weights, row_max, row_sum, rescale = _weigh(scores, row_max, row_sum, scale)
    for i in range(count - 1):
        started = _start_scores(q_tile, k_tiles, k_full, i + 1, SCORES, STAGES)
        operand = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
        adding = _start_sums(operand, v_tiles, v_full, acc, i, STAGES)
        scores = warpgroup_mma_wait(1, [started])
        mbarrier.arrive(k_empty.index((i + 1) % STAGES), count=1)
        at -= KEYS
        scores = _hide(scores, positions, at, front, last, SCORES)
        weights, row_max, row_sum, rescale = _weigh(scores, row_max, row_sum, scale)
        acc = warpgroup_mma_wait(0, [adding])
        mbarrier.arrive(v_empty.index(i % STAGES), count=1)
        acc = acc * gl.convert_layout(rescale, SUM_ROWS)[:, None]
    operand = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
    adding = _start_sums(operand, v_tiles, v_full, acc, count - 1, STAGES)
    acc = warpgroup_mma_wait(0, [adding])
    divisor = gl.convert_layout(gl.where(row_sum == 0.0, 1.0, row_sum), SUM_ROWS)
    acc = acc / divisor[:, None]
    index = INDEX * GROUP_QUERIES + gl.arange(0, GROUP_QUERIES, layout=SUM_ROWS)
    token, member = index // HEADS, part * HEADS + index % HEADS
    is_query = (token < num_tokens) & (token < M // HEADS) & (member < GROUP)
    to = ((query + token).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + member) * DIM
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUMS))
    gl.store(out + to[:, None] + dims[None, :], acc.to(gl.bfloat16), mask=is_query[:, None])


@gluon.jit(
    do_not_specialize=["num_rows", "num_tiles", "first_query"],
    do_not_specialize_on_alignment=["tables", "rows", "tiles"],
)
def prompt_attention_kernel(
    out, q, keys, values, tables, rows, tiles,
    num_rows, num_tiles, first_query, table_stride, q_stride, q_head_stride, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):
    """Grid (tiles, KV heads * parts of a group). `keys` and `values` are descriptors of [pages, PAGE, KV heads
    * DIM] in blocks of [1, KEYS, DIM]; the other arguments are those of paged_attention_kernel, for tiles of
    GROUPS * GROUP_QUERIES queries."""
    M: gl.constexpr = GROUPS * GROUP_QUERIES
    row = gl.load(tiles + gl.program_id(0))
    offset = gl.load(tiles + num_tiles + gl.program_id(0))
    kv_head, part = gl.program_id(1) % KV_HEADS, gl.program_id(1) // KV_HEADS
    slot, start = gl.load(rows + row), gl.load(rows + num_rows + row)
    tokens = gl.load(rows + 2 * num_rows + row)
    query = gl.load(rows + 3 * num_rows + row) + offset - first_query
    front, num_tokens = start + offset, gl.minimum(tokens - offset, M // HEADS)
    last = front + num_tokens
    count = gl.maximum((last + KEYS - 1) // KEYS, 1)
    table = tables + slot.to(gl.int64) * table_stride

    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, DIM], keys.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, DIM], values.layout)
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
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
    barriers = (k_full, k_empty, v_full, v_empty)
    place = (query, kv_head, part, front, num_tokens)
    tiles = (k_tiles, v_tiles, barriers)
    strides = (q_stride, q_head_stride)
    reading = (keys, values, tiles, table, kv_head * DIM, last, count, PAGE, STAGES)
    first = (out, q, tiles, place, strides, last, count, scale, GROUP, HEADS, KV_HEADS, M, STAGES, FIRST)
    second = (out, q, tiles, place, strides, last, count, scale, GROUP, HEADS, KV_HEADS, M, STAGES, SECOND)
    third = (out, q, tiles, place, strides, last, count, scale, GROUP, HEADS, KV_HEADS, M, STAGES, THIRD)
    if GROUPS == 2:
        gl.warp_specialize([(_attend, first), (_attend, second), (_read, reading)], [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(_attend, first), (_attend, second), (_attend, third), (_read, reading)],
            [4, 4, 1],
            [160, 160, 24],
        )
