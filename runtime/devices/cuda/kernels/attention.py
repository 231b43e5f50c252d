"""Attention over pages: one kernel for decodes, prompts and latents, and one that joins the parts of a split
sequence.

A program has a tile of queries, some tokens of one row times some of the heads that share a key head, so that
a tile of a decode is as tall as the tensor cores want and keys are read once for all of its heads (Ainslie et
al., 2023). It walks the keys with a running maximum and sum (Milakov and Gimelshein, 2018; Dao, 2023): first
those that the window cuts, then those that all queries see, then the diagonal; only the first and the last
are masked. Where there are fewer programs than the card has room for, the keys are split among several, whose
parts `merge` joins by their sums (Dao et al., Flash-Decoding, 2023).

Nothing here depends on the host but the grid: rows say where they are by device memory, so a launch may be
part of a graph. A row of no tokens is zeros. With LATENT the values are the keys (absorbed latent attention),
beside a second part of keys in another cache.
"""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.fp8_bytes import widen

FAR: tl.constexpr = tl.constexpr(float("-inf"))
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(
    cache: tl.tensor,
    locations: tl.tensor,
    stride: tl.tensor,
    is_seen: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """[keys, BLOCK] of a cache, as `tl.dot` takes it."""
    dims = tl.arange(0, BLOCK)
    at = cache + locations[:, None] * stride + dims[None, :]
    if MASKED:
        if BLOCK == DIM:
            x = tl.load(at, mask=is_seen[:, None], other=0)
        else:
            x = tl.load(at, mask=is_seen[:, None] & (dims < DIM)[None, :], other=0)
    elif BLOCK == DIM:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(dims < DIM)[None, :], other=0)
    return x.to(DOT) if NARROW == "" else widen(x, NARROW).to(DOT)


@triton.jit
def _scan(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    q_rope: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    ropes: tl.tensor,
    table: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    rope_stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NARROW: tl.constexpr,
    DOT: tl.constexpr,
) -> tuple:
    """Keys [begin, end), in tiles of N from a multiple of it on; outside [first, last) nothing is read."""
    for at in tl.range(begin, end, N):
        places = at + tl.arange(0, N)
        is_seen = (places >= first) & (places < last)
        if PAGE % N == 0:  # a tile lies in one page
            locations = tl.load(table + at // PAGE).to(tl.int64) * PAGE + at % PAGE + tl.arange(0, N)
        elif MASKED:
            locations = (
                tl.load(table + places // PAGE, mask=is_seen, other=0).to(tl.int64) * PAGE + places % PAGE
            )
        else:
            locations = tl.load(table + places // PAGE).to(tl.int64) * PAGE + places % PAGE
        k = _tile(keys, locations, key_stride, is_seen, DK, BLOCK_K, MASKED, NARROW, DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if LATENT:
            r = _tile(ropes, locations, rope_stride, is_seen, DR, BLOCK_R, MASKED, NARROW, DOT)
            scores = tl.dot(q_rope, tl.trans(r), scores, input_precision="tf32x3")
        scores *= scale
        if CAPPED:  # cap * tanh(x), of which `scale` made x and `cap` knows log2(e)
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))
        if MASKED:
            sees = is_seen[None, :] & (places[None, :] <= positions[:, None])
            if WINDOW > 0:
                sees = sees & (places[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(sees, scores, FAR)
        top = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(top == FAR, 0.0, top) if MASKED else top
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        v = k if LATENT else _tile(values, locations, value_stride, is_seen, DV, BLOCK_V, MASKED, NARROW, DOT)
        acc = tl.dot(weights.to(DOT), v, acc * fade[:, None], input_precision="tf32x3")
        peak = top
    return acc, peak, total


@triton.jit
def attend(
    out: tl.tensor,
    sums: tl.tensor,
    q: tl.tensor,
    q_rope: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    ropes: tl.tensor,
    tables: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    origin: tl.tensor,
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
    SPLITS: tl.constexpr,
    TILED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    NARROW: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles, key heads * parts of a group, splits). `rows` int32 [4, num_rows]: slot, start, count,
    first query; `tiles` int32 [2, num_tiles]: row and first token in it; with TILED False it is row i.
    Queries and results begin with query `origin`. With splits, out [tokens, heads, splits, DV] and sums
    [tokens, heads, splits] are float32 parts; with one, out [tokens, heads, DV] is the result."""
    index, split = tl.program_id(0), tl.program_id(2)
    kv_head, part = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    row, offset = index, 0
    if TILED:
        row, offset = tl.load(tiles + index), tl.load(tiles + num_tiles + index)
    slot, start, count = (
        tl.load(rows + row),
        tl.load(rows + num_rows + row),
        tl.load(rows + 2 * num_rows + row),
    )
    query = tl.load(rows + 3 * num_rows + row) + offset - origin
    TOKENS: tl.constexpr = M // HEADS
    lines = tl.arange(0, M)
    token, member = lines // HEADS, part * HEADS + lines % HEADS
    num_tokens = tl.minimum(count - offset, TOKENS)
    is_line = (token < tl.maximum(num_tokens, 1)) & (token < TOKENS) & (member < GROUP)
    head = kv_head * GROUP + member
    front = start + offset  # position of the first query
    rear = tl.where(num_tokens > 0, front + num_tokens - 1, -1)
    positions = tl.minimum(front + token, rear)
    dims, rope_dims, out_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    at = (query + token).to(tl.int64)
    q_tile = tl.load(
        q + at[:, None] * q_stride + head[:, None] * q_head_stride + dims[None, :],
        mask=is_line[:, None] & (dims < DK)[None, :],
        other=0,
    ).to(DOT)
    rope_tile = q_tile
    if LATENT:
        rope_tile = tl.load(
            q_rope + at[:, None] * rope_q_stride + head[:, None] * rope_q_head_stride + rope_dims[None, :],
            mask=is_line[:, None] & (rope_dims < DR)[None, :],
            other=0,
        ).to(DOT)
    acc, peak, total = _walk(
        q_tile,
        rope_tile,
        positions,
        keys + kv_head * DK,
        values + kv_head * DV,
        ropes,
        tables + slot.to(tl.int64) * table_stride,
        key_stride,
        value_stride,
        rope_stride,
        front,
        rear,
        split,
        scale,
        cap,
        SPLITS,
        WINDOW,
        CAPPED,
        LATENT,
        PAGE,
        M,
        N,
        DK,
        DV,
        DR,
        BLOCK_K,
        BLOCK_V,
        BLOCK_R,
        NARROW,
        DOT,
    )
    if HAS_SINKS and SPLITS == 1:
        acc, total = _sink(
            acc, peak, total, tl.load(sinks + head, mask=is_line, other=FAR).to(tl.float32) * LOG2E
        )
    whole = tl.where(total == 0.0, 1.0, total)
    acc = acc / whole[:, None]
    place = at * (KV_HEADS * GROUP) + head
    if SPLITS > 1:
        place = place * SPLITS + split
        tl.store(sums + place, tl.where(total == 0.0, FAR, peak + tl.log2(whole)), mask=is_line)
    tl.store(
        out + place[:, None] * DV + out_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_line[:, None] & (out_dims < DV)[None, :],
    )


@triton.jit
def _walk(
    q: tl.tensor,
    q_rope: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    ropes: tl.tensor,
    table: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    rope_stride: tl.tensor,
    front: tl.tensor,
    rear: tl.tensor,
    split: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
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
    NARROW: tl.constexpr,
    DOT: tl.constexpr,
) -> tuple:
    """This split's part of the keys that queries at positions `front` to `rear` see."""
    acc = tl.zeros((M, BLOCK_V), tl.float32)
    peak = tl.full((M,), FAR, tl.float32)
    total = tl.zeros((M,), tl.float32)
    first, last = rear * 0, rear + 1
    low, full = first, first
    if WINDOW > 0:
        first = tl.maximum(front - WINDOW + 1, 0)
        low = first // N * N
        full = (tl.maximum(rear - WINDOW + 1, 0) + N - 1) // N * N
    high, edge = last, (front + 1) // N * N
    if SPLITS > 1:
        size = tl.cdiv(tl.cdiv(last - low, N), SPLITS) * N
        low += split * size
        high = tl.minimum(low + size, last)
    if WINDOW > 0:
        middle = tl.minimum(tl.maximum(full, low), high)
        acc, peak, total = _scan(
            acc,
            peak,
            total,
            q,
            q_rope,
            positions,
            keys,
            values,
            ropes,
            table,
            key_stride,
            value_stride,
            rope_stride,
            low,
            middle,
            first,
            last,
            scale,
            cap,
            True,
            WINDOW,
            CAPPED,
            LATENT,
            PAGE,
            N,
            DK,
            DV,
            DR,
            BLOCK_K,
            BLOCK_V,
            BLOCK_R,
            NARROW,
            DOT,
        )
        low = tl.maximum(low, middle)
    turn = tl.maximum(tl.minimum(edge, high), low)
    acc, peak, total = _scan(
        acc,
        peak,
        total,
        q,
        q_rope,
        positions,
        keys,
        values,
        ropes,
        table,
        key_stride,
        value_stride,
        rope_stride,
        low,
        turn,
        first,
        last,
        scale,
        cap,
        False,
        WINDOW,
        CAPPED,
        LATENT,
        PAGE,
        N,
        DK,
        DV,
        DR,
        BLOCK_K,
        BLOCK_V,
        BLOCK_R,
        NARROW,
        DOT,
    )
    acc, peak, total = _scan(
        acc,
        peak,
        total,
        q,
        q_rope,
        positions,
        keys,
        values,
        ropes,
        table,
        key_stride,
        value_stride,
        rope_stride,
        turn,
        high,
        first,
        last,
        scale,
        cap,
        True,
        WINDOW,
        CAPPED,
        LATENT,
        PAGE,
        N,
        DK,
        DV,
        DR,
        BLOCK_K,
        BLOCK_V,
        BLOCK_R,
        NARROW,
        DOT,
    )
    return acc, peak, total


@triton.jit
def _sink(acc: tl.tensor, peak: tl.tensor, total: tl.tensor, sink: tl.tensor) -> tuple:
    """A learned logit that takes its share of the sum and adds nothing (Xiao et al., 2023)."""
    top = tl.maximum(peak, sink)
    top = tl.where(top == FAR, 0.0, top)
    fade = tl.exp2(peak - top)
    return acc * fade[:, None], total * fade + tl.exp2(sink - top)


@triton.jit
def merge(
    out: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (tokens, heads, pieces of DV): out [tokens, heads, DV] of parts and sums as `attend` leaves
    them."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    shares = tl.load(sums + place * SPLITS + splits)
    top = tl.max(shares, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == FAR, 0.0, top)
    shares = tl.exp2(shares - top)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    found = tl.load(
        parts + (place * SPLITS + splits)[:, None] * DV + dims[None, :], mask=(dims < DV)[None, :], other=0.0
    )
    acc = tl.sum(found * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * DV + dims, acc.to(out.dtype.element_ty), mask=dims < DV)
