"""Tokens from logits without sorting them: the choice of layers/sampling/sampler.py, found by searching for
thresholds.

In the order "largest weight first, then smallest id", what top_k and top_p keep is everything above some
weight and some of what equals it; and the token that a random number falls on is one of those of some weight.
Weights are positive float32, whose bits rise with them, so such a weight is found by thirty halvings, each a
sum over the weights that might matter. Four launches:

    peaks    the largest logit of each chunk of a row, and where it is
    weigh    sums of exp((logit - largest) / temperature) of each chunk, in all and above fixed weights
    collect  where something is cut: ids of the tokens above the largest of these weights that is low enough, in order
    pick     one program a row: searches among these, or the chunk and in it the token where the running sum passes the random number

Sums are float64 in an order that depends on the row alone, so a row's token depends on nothing else. It is
the token of the cpu device but for rounding: of exp (float32), and of sums in another order (float64).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.base import SamplingInputs
from runtime.devices.cuda.kernels.launch import power

CHUNK = 4096
NUM_MARKS = 8  # fixed weights: 1/2, 1/8, ... 1/8192, and whatever is above 0
LEAST: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
HELD = 1024  # candidates that `pick` holds in registers


@triton.jit
def weight_of(logits: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.exp((logits - peak) / temperature)


@triton.jit
def peaks(
    logits: tl.tensor,
    tops: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Grid (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    found = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
    top = tl.max(found, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(tops + place, top)
    tl.store(ids + place, tl.min(tl.where(found == top, at, vocab), 0))


@triton.jit
def weigh(
    logits: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    draws: tl.tensor,
    bounds: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MARKS: tl.constexpr,
) -> None:
    """Grid (rows, chunks). `draws` float32 [rows, 3]: temperature, top_p, min_p; `bounds` int32 [rows]:
    top_k, vocab for all."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(draws + row * 3)
    if temperature > 0:
        is_cut = (tl.load(draws + row * 3 + 1) < 1) | (tl.load(bounds + row) < vocab)
        chunks = tl.arange(0, CHUNKS)
        num_chunks = tl.num_programs(1)
        peak = tl.max(
            tl.load(tops + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")), 0
        )
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        weights = weight_of(
            tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")), peak, temperature
        )
        least = tl.where(is_cut, 0.0, tl.load(draws + row * 3 + 2))
        place = row * num_chunks + chunk
        tl.store(totals + place, tl.sum(tl.where(weights >= least, weights, 0.0).to(tl.float64), 0))
        if is_cut:
            for j in tl.static_range(MARKS):
                is_in = weights >= (0.5 * 0.25**j if j < MARKS - 1 else LEAST)
                tl.store(counts + place * MARKS + j, tl.sum(is_in.to(tl.int32), 0))
                tl.store(sums + place * MARKS + j, tl.sum(tl.where(is_in, weights, 0.0).to(tl.float64), 0))


@triton.jit
def collect(
    logits: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    candidates: tl.tensor,
    numbers: tl.tensor,
    draws: tl.tensor,
    bounds: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MARKS: tl.constexpr,
) -> None:
    """Grid (rows, chunks). Those above the largest mark that has top_k tokens, or top_p of the sum where
    there is no top_k."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p, top_k = tl.load(draws + row * 3), tl.load(draws + row * 3 + 1), tl.load(bounds + row)
    if (temperature > 0) & ((top_p < 1) | (top_k < vocab)):
        chunks, marks = tl.arange(0, CHUNKS), tl.arange(0, MARKS)
        num_chunks = tl.num_programs(1)
        is_chunk = chunks < num_chunks
        places = (row * num_chunks + chunks)[:, None] * MARKS + marks[None, :]
        held = tl.load(counts + places, mask=is_chunk[:, None], other=0)
        mass = tl.sum(tl.load(sums + places, mask=is_chunk[:, None], other=0.0), 0)
        total = tl.sum(tl.load(totals + row * num_chunks + chunks, mask=is_chunk, other=0.0), 0)
        by_k, by_p = tl.sum(held, 0) >= top_k, mass >= top_p.to(tl.float64) * total
        is_enough = tl.where(top_k < vocab, by_k, by_p)
        chosen = tl.min(tl.where(is_enough, marks, MARKS - 1), 0)
        bound = tl.where(chosen == MARKS - 1, LEAST, ((126 - 2 * chosen) << 23).to(tl.float32, bitcast=True))
        of_mark = tl.sum(tl.where(marks[None, :] == chosen, held, 0), 1)
        first = tl.sum(tl.where(chunks < chunk, of_mark, 0), 0)
        peak = tl.max(tl.load(tops + row * num_chunks + chunks, mask=is_chunk, other=float("-inf")), 0)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = (
            weight_of(
                tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")), peak, temperature
            )
            >= bound
        )
        tl.store(candidates + row * vocab + first + tl.cumsum(is_in.to(tl.int32), 0) - 1, at, mask=is_in)
        if chunk == 0:
            tl.store(numbers + row, tl.sum(of_mark, 0))


@triton.jit
def candidate(
    line: tl.tensor, ids: tl.tensor, at: tl.tensor, num: tl.tensor, peak: tl.tensor, temperature: tl.tensor
) -> tuple:
    """Ids, weights and the weights' bits; -1, 0 and -1 behind the last."""
    known = tl.load(ids + at, mask=at < num, other=0)
    weights = weight_of(tl.load(line + known, mask=at < num, other=float("-inf")), peak, temperature)
    return tl.where(at < num, known, -1), weights, tl.where(at < num, weights.to(tl.int32, bitcast=True), -1)


@triton.jit
def above(
    line: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    bits: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    bound: tl.tensor,
    HELD: tl.constexpr,
) -> tuple:
    """How many candidates have bits of at least `bound`, and the sum of their weights. The first HELD are in
    registers."""
    is_in = bits >= bound
    count, total = tl.sum(is_in.to(tl.int32), 0), tl.sum(tl.where(is_in, weights, 0.0).to(tl.float64), 0)
    for at in tl.range(HELD, num, HELD):
        others, more, more_bits = candidate(line, ids, at + tl.arange(0, HELD), num, peak, temperature)
        is_in = more_bits >= bound
        count += tl.sum(is_in.to(tl.int32), 0)
        total += tl.sum(tl.where(is_in, more, 0.0).to(tl.float64), 0)
    return count, total


@triton.jit
def search(
    line: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    bits: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    target: tl.tensor,
    BY: tl.constexpr,
    HELD: tl.constexpr,
) -> tl.tensor:
    """The largest bits of which those at or above them are `target` many (BY count), or weigh as much (BY
    sum), or more (BY more)."""
    found = num * 0
    for step in tl.range(0, 30):  # no weight is above 1, whose bits are below 1 << 30
        trial = found | (1 << (29 - step))
        count, total = above(line, ids, weights, bits, num, peak, temperature, trial, HELD)
        if BY == "count":
            is_low = count.to(tl.float64) >= target
        elif BY == "sum":
            is_low = total >= target
        else:
            is_low = total > target
        found = tl.where(is_low, trial, found)
    return found


@triton.jit
def pick_cut(
    line: tl.tensor,
    ids: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    vocab: tl.tensor,
    uniform: tl.tensor,
    HELD: tl.constexpr,
) -> tl.tensor:
    """Kept is what has more than `edge` as bits, and the first `ties` of those that have just these."""
    known, weights, bits = candidate(line, ids, tl.arange(0, HELD), num, peak, temperature)
    edge, ties, mass = num * 0, num * 0, total
    if top_k < vocab:
        edge = search(line, ids, weights, bits, num, peak, temperature, top_k.to(tl.float64), "count", HELD)
        more, sum_more = above(line, ids, weights, bits, num, peak, temperature, edge + 1, HELD)
        ties = tl.where(edge > 0, top_k - more, 0)
        mass = sum_more + ties * edge.to(tl.float32, bitcast=True).to(tl.float64)
    if top_p < 1:
        mass = mass * top_p.to(tl.float64)
        lower = search(line, ids, weights, bits, num, peak, temperature, mass, "sum", HELD)
        most = tl.where(lower > edge, num, ties)
        edge = tl.maximum(lower, edge)
        more, sum_more = above(line, ids, weights, bits, num, peak, temperature, edge + 1, HELD)
        wanted = tl.ceil(
            (mass - sum_more) / tl.maximum(edge.to(tl.float32, bitcast=True), 1e-38).to(tl.float64)
        )
        same, sum_same = above(line, ids, weights, bits, num, peak, temperature, edge, HELD)
        ties = tl.minimum(tl.maximum(wanted, 1.0), tl.minimum(most, same - more).to(tl.float64)).to(tl.int32)
    least = min_p.to(tl.int32, bitcast=True) - 1
    ties = tl.where(least >= edge, 0, ties)
    edge = tl.maximum(edge, least)
    num_kept, sum_more = above(line, ids, weights, bits, num, peak, temperature, edge + 1, HELD)
    unit = edge.to(tl.float32, bitcast=True).to(tl.float64)
    target = uniform * (sum_more + tl.where(ties > 0, ties * unit, 0.0))
    value, most = edge, ties
    if (ties == 0) | (target < sum_more):
        value = search(line, ids, weights, bits, num, peak, temperature, target, "more", HELD)
        most, sum_same = above(line, ids, weights, bits, num, peak, temperature, value, HELD)
        more, sum_more = above(line, ids, weights, bits, num, peak, temperature, value + 1, HELD)
        most -= more
        unit = value.to(tl.float32, bitcast=True).to(tl.float64)
    nth = tl.minimum(tl.maximum(tl.floor((target - sum_more) / unit), 0.0), (most - 1).to(tl.float64)).to(
        tl.int32
    )
    is_same = bits == value
    order = tl.cumsum(is_same.to(tl.int32), 0)
    token = tl.max(tl.where(is_same & (order == nth + 1), known, -1), 0)
    passed = tl.max(order, 0)
    for at in tl.range(HELD, num, HELD):
        known, others, bits = candidate(line, ids, at + tl.arange(0, HELD), num, peak, temperature)
        is_same = bits == value
        order = passed + tl.cumsum(is_same.to(tl.int32), 0)
        token = tl.maximum(token, tl.max(tl.where(is_same & (order == nth + 1), known, -1), 0))
        passed = tl.max(order, 0)
    return token


@triton.jit
def pick_plain(
    line: tl.tensor,
    totals: tl.tensor,
    num_chunks: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    vocab: tl.tensor,
    uniform: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """In the order of the vocabulary: the chunk where the running sum passes, then the token."""
    chunks = tl.arange(0, CHUNKS)
    sums = tl.cumsum(tl.load(totals + chunks, mask=chunks < num_chunks, other=0.0), 0)
    target = uniform * tl.max(sums, 0)
    chunk = tl.min(tl.where(sums > target, chunks, CHUNKS - 1), 0)
    before = tl.max(tl.where(chunks < chunk, sums, 0.0), 0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    weights = weight_of(tl.load(line + at, mask=at < vocab, other=float("-inf")), peak, temperature)
    weights = tl.where(weights >= min_p, weights, 0.0)
    running = before + tl.cumsum(weights.to(tl.float64), 0)
    last = tl.max(tl.where(weights > 0, at, 0), 0)  # should rounding have made the chunk's own sum larger
    return tl.minimum(tl.min(tl.where(running > target, at, vocab), 0), last)


@triton.jit
def pick(
    logits: tl.tensor,
    tokens: tl.tensor,
    tops: tl.tensor,
    top_ids: tl.tensor,
    totals: tl.tensor,
    candidates: tl.tensor,
    numbers: tl.tensor,
    draws: tl.tensor,
    bounds: tl.tensor,
    uniforms: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    num_chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
) -> None:
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p, min_p = (
        tl.load(draws + row * 3),
        tl.load(draws + row * 3 + 1),
        tl.load(draws + row * 3 + 2),
    )
    top_k, uniform = tl.load(bounds + row), tl.load(uniforms + row)
    line = logits + row * stride
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    found = tl.load(tops + row * num_chunks + chunks, mask=is_chunk, other=float("-inf"))
    peak = tl.max(found, 0)
    if temperature > 0:
        if (top_p < 1) | (top_k < vocab):
            total = tl.sum(tl.load(totals + row * num_chunks + chunks, mask=is_chunk, other=0.0), 0)
            token = pick_cut(
                line,
                candidates + row * vocab,
                tl.load(numbers + row),
                peak,
                total,
                temperature,
                top_p,
                min_p,
                top_k,
                vocab,
                uniform,
                HELD,
            )
        else:
            token = pick_plain(
                line,
                totals + row * num_chunks,
                num_chunks,
                peak,
                temperature,
                min_p,
                vocab,
                uniform,
                CHUNKS,
                CHUNK,
            )
    else:
        token = tl.min(
            tl.where(
                found == peak, tl.load(top_ids + row * num_chunks + chunks, mask=is_chunk, other=0), vocab
            ),
            0,
        )
    tl.store(tokens + row, token.to(tl.int64))


def sample(logits: Tensor, draw: SamplingInputs, chunk: int = CHUNK, held: int = HELD) -> Tensor:
    """See Ops.sample: finite float32 logits [N, V] -> int64 [N]. Nothing is read from the device."""
    num, vocab = logits.shape
    tokens = torch.empty(num, dtype=torch.int64, device=logits.device)
    if num == 0:
        return tokens
    draws = torch.stack((draw.temperature, draw.top_p, draw.min_p), dim=1)
    bounds = torch.where(draw.top_k > 0, draw.top_k, vocab).clamp_max(vocab).int()
    num_chunks = triton.cdiv(vocab, chunk)

    def empty(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num, *shape, dtype=kind, device=logits.device)

    tops, top_ids, totals = (
        empty(torch.float32, num_chunks),
        empty(torch.int32, num_chunks),
        empty(torch.float64, num_chunks),
    )
    counts, sums = empty(torch.int32, num_chunks, NUM_MARKS), empty(torch.float64, num_chunks, NUM_MARKS)
    candidates, numbers = empty(torch.int32, vocab), empty(torch.int32)
    grid, stride, chunks = (num, num_chunks), logits.stride(0), power(num_chunks, 2)
    peaks[grid](logits, tops, top_ids, vocab, stride, CHUNK=chunk, num_warps=8)
    weigh[grid](
        logits,
        tops,
        totals,
        counts,
        sums,
        draws,
        bounds,
        vocab,
        stride,
        CHUNKS=chunks,
        CHUNK=chunk,
        MARKS=NUM_MARKS,
        num_warps=8,
    )
    collect[grid](
        logits,
        tops,
        totals,
        counts,
        sums,
        candidates,
        numbers,
        draws,
        bounds,
        vocab,
        stride,
        CHUNKS=chunks,
        CHUNK=chunk,
        MARKS=NUM_MARKS,
        num_warps=8,
    )
    pick[(num,)](
        logits,
        tokens,
        tops,
        top_ids,
        totals,
        candidates,
        numbers,
        draws,
        bounds,
        draw.uniform,
        vocab,
        stride,
        num_chunks,
        CHUNKS=chunks,
        CHUNK=chunk,
        HELD=held,
        num_warps=8,
    )
    return tokens
