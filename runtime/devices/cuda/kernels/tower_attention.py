"""Attention in towers of images and sounds: each query sees all keys of its group.

A program has a tile of queries of one head of one group (an image, a window of it, or a sound) and walks the
keys of that group with a running maximum and sum (Milakov and Gimelshein, 2018; Dao, 2023). Heads of towers
have 72, 80 or 88 numbers, and tiles have powers of two, so a head is two blocks: 64 numbers, and the rest.
"""

from typing import NamedTuple

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))


class Walk(NamedTuple):
    """The state of a tile: weighted values in two blocks, maximum and sum."""

    acc: tl.tensor  # [M, BLOCK]
    rest: tl.tensor  # [M, REST]
    row_max: tl.tensor  # [M]
    row_sum: tl.tensor


class Sizes(NamedTuple):
    """Compile-time sizes of a program."""

    N: tl.constexpr  # keys of a tile
    DIM: tl.constexpr  # numbers of a head
    BLOCK: tl.constexpr  # of its first block
    REST: tl.constexpr  # of the block that holds the others; 0: there are none
    DOT: tl.constexpr  # dtype of the matrix products


@triton.jit
def _load(
    x: tl.tensor,
    positions: tl.tensor,
    num: tl.tensor,
    stride: tl.tensor,
    BEGIN: tl.constexpr,
    COUNT: tl.constexpr,
    MASKED: tl.constexpr,
    S: tl.constexpr,
) -> tl.tensor:
    """Numbers [BEGIN, BEGIN + COUNT) of rows at `positions`, zeros for those from `num` on (MASKED) and for
    numbers that a head does not have."""
    dims = BEGIN + tl.arange(0, COUNT)
    at = x + positions[:, None].to(tl.int64) * stride + dims[None, :]
    is_row, is_dim = (positions < num)[:, None], (dims < S.DIM)[None, :]
    if MASKED and BEGIN + COUNT > S.DIM:
        found = tl.load(at, mask=is_row & is_dim, other=0)
    elif MASKED:
        found = tl.load(at, mask=is_row, other=0)
    elif BEGIN + COUNT > S.DIM:
        found = tl.load(at, mask=is_dim, other=0)
    else:
        found = tl.load(at)
    return found.to(S.DOT)


@triton.jit
def _attend(
    walk: Walk,
    queries: tl.tuple,
    caches: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    num_keys: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    S: tl.constexpr,
) -> Walk:
    """Adds keys [begin, end) in tiles; with MASKED those from `num_keys` on have no part."""
    q, q_rest = queries
    k, k_stride, v, v_stride = caches
    acc, rest, row_max, row_sum = walk.acc, walk.rest, walk.row_max, walk.row_sum
    for at in tl.range(begin, end, S.N):
        positions = at + tl.arange(0, S.N)
        keys = _load(k, positions, num_keys, k_stride, 0, S.BLOCK, MASKED, S)
        scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
        if S.REST > 0:
            keys = _load(k, positions, num_keys, k_stride, S.BLOCK, S.REST, MASKED, S)
            scores = tl.dot(q_rest, tl.trans(keys), scores, input_precision="tf32x3")
        if MASKED:
            scores = tl.where((positions < num_keys)[None, :], scores, NEG_INF)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        probs = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        values = _load(v, positions, num_keys, v_stride, 0, S.BLOCK, MASKED, S)
        acc = tl.dot(probs.to(S.DOT), values, acc * rescale[:, None], input_precision="tf32x3")
        if S.REST > 0:
            values = _load(v, positions, num_keys, v_stride, S.BLOCK, S.REST, MASKED, S)
            rest = tl.dot(probs.to(S.DOT), values, rest * rescale[:, None], input_precision="tf32x3")
        row_max = new_max
    return Walk(acc, rest, row_max, row_sum)


@triton.jit
def _store(
    out: tl.tensor,
    acc: tl.tensor,
    positions: tl.tensor,
    num: tl.tensor,
    stride: tl.tensor,
    BEGIN: tl.constexpr,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Numbers [BEGIN, BEGIN + COUNT) of rows at `positions`."""
    dims = BEGIN + tl.arange(0, COUNT)
    tl.store(
        out + positions[:, None].to(tl.int64) * stride + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=(positions < num)[:, None] & (dims < DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def tower_attention_kernel(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    scale: tl.tensor,
    out_group: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    q_group: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_group: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_group: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    DOT: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """q [groups, heads, num_queries, DIM], k and v [groups, heads, num_keys, DIM] -> out as q; the strides of
    each for a group, a head and a row are in units of UNIT numbers, and numbers stand one behind the other.
    Grid (tiles of queries, heads, groups). `scale`: of scores, times log2(e)."""
    S: tl.constexpr = Sizes(N, DIM, BLOCK, REST, DOT)
    head, group = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    q += (group * q_group + head * q_head) * UNIT
    k += (group * k_group + head * k_head) * UNIT
    v += (group * v_group + head * v_head) * UNIT
    out += (group * out_group + head * out_head) * UNIT
    q_tile = _load(q, rows, num_queries, q_row * UNIT, 0, BLOCK, True, S)
    q_rest = q_tile
    if REST > 0:
        q_rest = _load(q, rows, num_queries, q_row * UNIT, BLOCK, REST, True, S)
    walk = Walk(
        tl.zeros((M, BLOCK), tl.float32),
        tl.zeros((M, REST if REST > 0 else 16), tl.float32),
        tl.full((M,), NEG_INF, tl.float32),
        tl.zeros((M,), tl.float32),
    )
    whole = num_keys // N * N
    caches = k, k_row * UNIT, v, v_row * UNIT
    walk = _attend(walk, (q_tile, q_rest), caches, 0, whole, num_keys, scale, False, S)
    walk = _attend(walk, (q_tile, q_rest), caches, whole, num_keys, num_keys, scale, True, S)
    _store(out, walk.acc / walk.row_sum[:, None], rows, num_queries, out_row * UNIT, 0, BLOCK, DIM)
    if REST > 0:
        _store(out, walk.rest / walk.row_sum[:, None], rows, num_queries, out_row * UNIT, BLOCK, REST, DIM)
