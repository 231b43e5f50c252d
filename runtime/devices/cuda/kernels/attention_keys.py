"""How a program of paged attention walks keys: in tiles of N, with a running maximum and sum.

What a tile costs beside its products decides how fast prompts are, so a walk has forms (attention_tiles.py):
tiles read by pointers of each thread, or with TMA by one thread as a block of a descriptor; scores scaled
before their maximum, or with FOLDS within the exponent; and one tile a step, or with TOGETHER 2 two of them,
for which results are rescaled once.

A descriptor has the shape [pages, tokens, heads * dim], and what is outside of a page reads as zeros. So the
last tile of a row ends where its keys end, and begins before its page: what the row does not have is never
read, which else could be NaN, and no thread has to mask it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.attention_splits import NEG_INF
from runtime.devices.cuda.kernels.fp8_bytes import from_fp8


class Cache(NamedTuple):
    """The KV cache as one KV head and one row see it: pointers and strides of its tokens in elements, or with
    TMA descriptors of [pages, tokens, heads * dim] and the head's first column in them."""

    k_cache: tl.tensor
    v_cache: tl.tensor
    rope_cache: tl.tensor  # rotary parts of the keys, with LATENT only
    key_column: tl.tensor
    value_column: tl.tensor
    page_table: tl.tensor  # int32, of the row's slot
    key_stride: tl.tensor
    value_stride: tl.tensor
    rope_stride: tl.tensor


class Form(NamedTuple):
    """How keys are walked."""

    TMA: tl.constexpr  # tiles are blocks of descriptors: without WINDOW and FP8, a tile lies in one page
    FOLDS: tl.constexpr  # scores are scaled within the exponent; neither CAPPED nor BIASED
    TOGETHER: tl.constexpr  # tiles of a step, 1 or 2


class Sizes(NamedTuple):
    """Compile-time sizes of a program."""

    WINDOW: tl.constexpr  # sliding window, 0: none
    CAPPED: tl.constexpr
    BIASED: tl.constexpr  # scores have linear biases by distance (ALiBi, Press et al., 2022)
    LATENT: tl.constexpr
    PAGE: tl.constexpr  # tokens of a page
    M: tl.constexpr  # queries of a tile
    N: tl.constexpr  # keys of a tile
    DK: tl.constexpr  # head sizes of keys, values and rotary parts, and the blocks that hold them
    DV: tl.constexpr
    DR: tl.constexpr
    BLOCK_K: tl.constexpr
    BLOCK_V: tl.constexpr
    BLOCK_R: tl.constexpr
    FP8: tl.constexpr  # format of an 8-bit cache, "" for a cache in the queries' dtype
    DOT: tl.constexpr  # dtype of the matrix products
    FORM: tl.constexpr


class Queries(NamedTuple):
    """A tile of queries: [M, BLOCK_K], rotary parts [M, BLOCK_R], positions [M], score factors, and slopes of
    biases [M]."""

    q: tl.tensor
    q_rope: tl.tensor
    positions: tl.tensor
    scale: tl.tensor
    cap: tl.tensor
    slopes: tl.tensor  # times log2(e); with BIASED only


class Softmax(NamedTuple):
    """State of the online softmax: weighted values [M, BLOCK_V], maximum and sum [M]."""

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


@triton.jit
def cache_of(
    caches: tl.tuple,
    tables: tl.tensor,
    slot: tl.tensor,
    kv_head: tl.tensor,
    strides: tl.tuple,
    S: tl.constexpr,
) -> Cache:
    """The cache of a slot and a head, of all keys, values and rotary parts. `strides`: of tables, keys,
    values and rotary parts."""
    k_cache, v_cache, ropes = caches
    table_stride, key_stride, value_stride, rope_stride = strides
    key_column, value_column = kv_head * S.DK, kv_head * S.DV
    if not S.FORM.TMA:
        k_cache, v_cache = k_cache + key_column, v_cache + value_column
    table = tables + slot.to(tl.int64) * table_stride
    columns = key_column, value_column
    return Cache(k_cache, v_cache, ropes, *columns, table, key_stride, value_stride, rope_stride)


class Place(NamedTuple):
    """Where the keys of a tile are in the cache, and which of them a program sees at all."""

    locations: tl.tensor  # int64 [N], without TMA
    page: tl.tensor  # with TMA, and the first token in it, which may be negative
    token: tl.tensor
    positions: tl.tensor  # [N]
    is_seen: tl.tensor  # bool [N]


@triton.jit
def _block_of(cache: Cache, at: tl.tensor, last: tl.tensor, MASKED: tl.constexpr, S: tl.constexpr) -> Place:
    """The place of keys [at, at + N) with TMA, or of the N keys before `last` where that comes sooner."""
    begin, page, token = at, at, at % S.PAGE
    if MASKED:
        begin = tl.minimum(at, last - S.N)
        page = tl.load(cache.page_table + at // S.PAGE, mask=at < last, other=0)
        token = tl.where(at < last, token + begin - at, -S.N)  # outside of the page if the row has ended
    else:
        page = tl.load(cache.page_table + at // S.PAGE)
    positions = begin + tl.arange(0, S.N)
    return Place(positions, page, token, positions, (positions >= at) & (positions < last))


@triton.jit
def _place_of(
    cache: Cache, at: tl.tensor, first: tl.tensor, last: tl.tensor, MASKED: tl.constexpr, S: tl.constexpr
) -> Place:
    """The place of keys [at, at + N); `at` is a multiple of N. Pages outside [first, last) are not looked
    up."""
    if S.FORM.TMA:
        return _block_of(cache, at, last, MASKED, S)
    else:
        positions = at + tl.arange(0, S.N)
        is_seen = (positions >= first) & (positions < last)
        if S.PAGE % S.N == 0:  # a tile lies in one page
            if MASKED and S.FORM.TOGETHER > 1:
                page = tl.load(cache.page_table + at // S.PAGE, mask=at < last, other=0).to(tl.int64)
            else:
                page = tl.load(cache.page_table + at // S.PAGE).to(tl.int64)
            locations = page * S.PAGE + at % S.PAGE + tl.arange(0, S.N)
        elif MASKED:
            pages = tl.load(cache.page_table + positions // S.PAGE, mask=is_seen, other=0).to(tl.int64)
            locations = pages * S.PAGE + positions % S.PAGE
        else:
            pages = tl.load(cache.page_table + positions // S.PAGE).to(tl.int64)
            locations = pages * S.PAGE + positions % S.PAGE
        return Place(locations, at, at, positions, is_seen)


@triton.jit
def _load_cache_tile(
    cache: tl.tensor,
    column: tl.tensor,
    place: Place,
    stride: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    S: tl.constexpr,
) -> tl.tensor:
    """[keys, BLOCK] of a cache, as `tl.dot` takes it; zeros for keys that the row does not have."""
    if S.FORM.TMA:
        x = cache.load([place.page, place.token, column]).reshape(S.N, BLOCK)
    else:
        dims = tl.arange(0, BLOCK)
        at = cache + place.locations[:, None] * stride + dims[None, :]
        if MASKED:
            if BLOCK == DIM:
                x = tl.load(at, mask=place.is_seen[:, None], other=0)
            else:
                x = tl.load(at, mask=place.is_seen[:, None] & (dims < DIM)[None, :], other=0)
        elif BLOCK == DIM:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(dims < DIM)[None, :], other=0)
    return x.to(S.DOT) if S.FP8 == "" else from_fp8(x, S.FP8).to(S.DOT)


@triton.jit
def _load_keys(cache: Cache, place: Place, MASKED: tl.constexpr, S: tl.constexpr) -> tl.tensor:
    return _load_cache_tile(
        cache.k_cache, cache.key_column, place, cache.key_stride, S.DK, S.BLOCK_K, MASKED, S
    )


@triton.jit
def _load_values(
    cache: Cache, place: Place, k: tl.tensor, MASKED: tl.constexpr, S: tl.constexpr
) -> tl.tensor:
    """The values of keys k."""
    if S.LATENT:
        v = k
    else:
        v = _load_cache_tile(
            cache.v_cache, cache.value_column, place, cache.value_stride, S.DV, S.BLOCK_V, MASKED, S
        )
    return v


@triton.jit
def _scores(
    queries: Queries, k: tl.tensor, cache: Cache, place: Place, MASKED: tl.constexpr, S: tl.constexpr
) -> tl.tensor:
    """Scores [M, N] of a tile of keys k [N, BLOCK_K], with FOLDS not scaled, -inf where a query does not see
    a key."""
    scores = tl.dot(queries.q, tl.trans(k), input_precision="tf32x3")
    if S.LATENT:
        rope = _load_cache_tile(cache.rope_cache, 0, place, cache.rope_stride, S.DR, S.BLOCK_R, MASKED, S)
        scores = tl.dot(queries.q_rope, tl.trans(rope), scores, input_precision="tf32x3")
    if not S.FORM.FOLDS:
        scores *= queries.scale
    if S.CAPPED:  # cap * tanh(x); x is multiplied by `scale`, and `cap` contains log2(e)
        scores = queries.cap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))
    if S.BIASED:
        distances = place.positions[None, :] - queries.positions[:, None]
        scores += queries.slopes[:, None] * distances.to(tl.float32)
    if MASKED:
        sees = place.is_seen[None, :] & (place.positions[None, :] <= queries.positions[:, None])
        if S.WINDOW > 0:
            sees = sees & (place.positions[None, :] > queries.positions[:, None] - S.WINDOW)
        scores = tl.where(sees, scores, NEG_INF)
    return scores


@triton.jit
def _weights(scores: tl.tensor, base: tl.tensor, queries: Queries, S: tl.constexpr) -> tl.tensor:
    """Weights [M, N] of scores relative to `base` [M]."""
    if S.FORM.FOLDS:
        return tl.exp2(scores * queries.scale - base[:, None])
    else:
        return tl.exp2(scores - base[:, None])


@triton.jit
def _attend_tiles(
    state: Softmax,
    queries: Queries,
    cache: Cache,
    begin: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    MASKED: tl.constexpr,
    S: tl.constexpr,
) -> Softmax:
    """Adds keys [begin, end) in steps of TOGETHER tiles; `begin` is a multiple of a step. Nothing outside
    [first, last) has a part."""
    acc, row_max, row_sum = state.acc, state.row_max, state.row_sum
    for at in tl.range(begin, end, S.N * S.FORM.TOGETHER):
        place = _place_of(cache, at, first, last, MASKED, S)
        k = _load_keys(cache, place, MASKED, S)
        scores = _scores(queries, k, cache, place, MASKED, S)
        highest = tl.max(scores, 1)
        if S.FORM.TOGETHER > 1:
            second = _place_of(cache, at + S.N, first, last, MASKED, S)
            second_k = _load_keys(cache, second, MASKED, S)
            second_scores = _scores(queries, second_k, cache, second, MASKED, S)
            highest = tl.max(tl.maximum(scores, second_scores), 1)
        if S.FORM.FOLDS:
            highest *= queries.scale
        new_max = tl.maximum(row_max, highest)
        base = tl.where(new_max == NEG_INF, 0.0, new_max) if MASKED else new_max
        probs = _weights(scores, base, queries, S)
        rescale = tl.exp2(row_max - base)
        sums = tl.sum(probs, 1)
        if S.FORM.TOGETHER > 1:
            second_probs = _weights(second_scores, base, queries, S)
            sums = tl.sum(probs + second_probs, 1)
        row_sum = row_sum * rescale + sums
        v = _load_values(cache, place, k, MASKED, S)
        acc = tl.dot(probs.to(S.DOT), v, acc * rescale[:, None], input_precision="tf32x3")
        if S.FORM.TOGETHER > 1:
            second_v = _load_values(cache, second, second_k, MASKED, S)
            acc = tl.dot(second_probs.to(S.DOT), second_v, acc, input_precision="tf32x3")
        row_max = new_max
    return Softmax(acc, row_max, row_sum)


@triton.jit
def attend_keys(
    queries: Queries,
    cache: Cache,
    front: tl.tensor,
    rear: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
    SPLIT: tl.constexpr,
    S: tl.constexpr,
) -> Softmax:
    """Attends to this split's part of the keys that queries at positions `front` to `rear` see."""
    state = Softmax(
        tl.zeros((S.M, S.BLOCK_V), tl.float32),
        tl.full((S.M,), NEG_INF, tl.float32),
        tl.zeros((S.M,), tl.float32),
    )
    STEP: tl.constexpr = S.N * S.FORM.TOGETHER
    first, last = rear * 0, rear + 1
    low, full = first, first
    if S.WINDOW > 0:
        first = tl.maximum(front - S.WINDOW + 1, 0)
        low = first // STEP * STEP
        full = (tl.maximum(rear - S.WINDOW + 1, 0) + STEP - 1) // STEP * STEP
    high, diagonal = last, (front + 1) // STEP * STEP
    if SPLIT:
        size = tl.cdiv(tl.cdiv(last - low, STEP), num_splits) * STEP
        low += split * size
        high = tl.minimum(low + size, last)
    if S.WINDOW > 0:
        middle = tl.minimum(tl.maximum(full, low), high)
        state = _attend_tiles(state, queries, cache, low, middle, first, last, True, S)
        low = tl.maximum(low, middle)
    turn = tl.maximum(tl.minimum(diagonal, high), low)
    state = _attend_tiles(state, queries, cache, low, turn, first, last, False, S)
    return _attend_tiles(state, queries, cache, turn, high, first, last, True, S)
