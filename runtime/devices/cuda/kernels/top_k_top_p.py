"""Sampling of one row with top_k, top_p or min_p from its candidates, without sorting them.

In the order "largest weight first, then smallest id", top_k and top_p keep everything above some weight and
the first few tokens of just that weight; and the sampled token is one of those of some weight. Weights are
positive float32, whose bits rise with them, so such a weight is found by thirty bisections, each of which
sums the candidates: lane by lane first, over blocks of HELD candidates, and then the lanes. The first block
stays in registers, the others are read again each time.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Candidates(NamedTuple):
    """The tokens of a row that may be sampled."""

    ids: tl.tensor  # pointer to int32 token ids, rising
    weights: tl.tensor  # pointer to their float32 weights
    num: tl.tensor


class Block(NamedTuple):
    """The first HELD candidates: ids, weights and the weights' bits; -1, 0 and -1 behind the last."""

    ids: tl.tensor
    weights: tl.tensor
    bits: tl.tensor


class Kept(NamedTuple):
    """What the limits keep: tokens with more than `edge` as bits of their weight, which weigh `mass`, and the
    first `ties` of those with just these bits."""

    edge: tl.tensor
    ties: tl.tensor
    mass: tl.tensor


@triton.jit
def token_weight(logits: tl.tensor, row_max: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """A token's weight: 1 for the largest logit of the row."""
    return tl.exp((logits - row_max) / temperature)


@triton.jit
def _weight_of_bits(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _load_block(of: Candidates, at: tl.tensor) -> Block:
    """Candidates `at`."""
    ids = tl.load(of.ids + at, mask=at < of.num, other=-1)
    weights = tl.load(of.weights + at, mask=at < of.num, other=0.0)
    bits = tl.where(at < of.num, weights.to(tl.int32, bitcast=True), -1)
    return Block(ids, weights, bits)


@triton.jit
def _mass_above(of: Candidates, head: Block, bound: tl.tensor, HELD: tl.constexpr) -> tuple:
    """The number of candidates with bits of at least `bound`, and the sum of their weights."""
    is_in = head.bits >= bound
    counts, sums = is_in.to(tl.int32), tl.where(is_in, head.weights, 0.0).to(tl.float64)
    for at in tl.range(HELD, of.num, HELD):
        block = _load_block(of, at + tl.arange(0, HELD))
        is_in = block.bits >= bound
        counts += is_in.to(tl.int32)
        sums += tl.where(is_in, block.weights, 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(sums, 0)


@triton.jit
def _search_threshold(
    of: Candidates, head: Block, target: tl.tensor, BY: tl.constexpr, HELD: tl.constexpr
) -> tl.tensor:
    """The largest bits for which the candidates with at least these bits are `target` many (BY count), weigh
    `target` (BY sum) or weigh more than it (BY more)."""
    bits = of.num * 0
    for step in tl.range(0, 30):  # no weight is above 1, whose bits are below 1 << 30
        trial = bits | (1 << (29 - step))
        count, total = _mass_above(of, head, trial, HELD)
        if BY == "count":
            is_low = count.to(tl.float64) >= target
        elif BY == "sum":
            is_low = total >= target
        else:
            is_low = total > target
        bits = tl.where(is_low, trial, bits)
    return bits


@triton.jit
def _apply_limits(
    of: Candidates,
    head: Block,
    total: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    vocab: tl.tensor,
    HELD: tl.constexpr,
) -> Kept:
    """top_k, then top_p of what it keeps, then min_p. `total`: the weight of the whole row."""
    edge, ties, mass = of.num * 0, of.num * 0, total
    if top_k < vocab:
        edge = _search_threshold(of, head, top_k.to(tl.float64), "count", HELD)
        more, sum_more = _mass_above(of, head, edge + 1, HELD)
        ties = tl.where(edge > 0, top_k - more, 0)
        mass = sum_more + ties * _weight_of_bits(edge)
    if top_p < 1:
        mass = mass * top_p.to(tl.float64)
        lower = _search_threshold(of, head, mass, "sum", HELD)
        most = tl.where(lower > edge, of.num, ties)
        edge = tl.maximum(lower, edge)
        more, sum_more = _mass_above(of, head, edge + 1, HELD)
        weight = tl.maximum(edge.to(tl.float32, bitcast=True), 1e-38).to(tl.float64)
        wanted = tl.ceil((mass - sum_more) / weight)
        same, sum_same = _mass_above(of, head, edge, HELD)
        ties = tl.minimum(tl.maximum(wanted, 1.0), tl.minimum(most, same - more).to(tl.float64)).to(tl.int32)
    least = min_p.to(tl.int32, bitcast=True) - 1
    ties = tl.where(least >= edge, 0, ties)
    edge = tl.maximum(edge, least)
    num_kept, sum_more = _mass_above(of, head, edge + 1, HELD)
    return Kept(edge, ties, sum_more)


@triton.jit
def _nth_of_value(
    of: Candidates, head: Block, value: tl.tensor, nth: tl.tensor, HELD: tl.constexpr
) -> tl.tensor:
    """The id of the candidate with these bits that has `nth` others of them before it."""
    is_same = head.bits == value
    order = tl.cumsum(is_same.to(tl.int32), 0)
    token = tl.max(tl.where(is_same & (order == nth + 1), head.ids, -1), 0)
    passed = tl.max(order, 0)
    for at in tl.range(HELD, of.num, HELD):
        block = _load_block(of, at + tl.arange(0, HELD))
        is_same = block.bits == value
        order = passed + tl.cumsum(is_same.to(tl.int32), 0)
        token = tl.maximum(token, tl.max(tl.where(is_same & (order == nth + 1), block.ids, -1), 0))
        passed = tl.max(order, 0)
    return token


@triton.jit
def sample_truncated(
    of: Candidates,
    total: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    vocab: tl.tensor,
    uniform: tl.tensor,
    HELD: tl.constexpr,
) -> tl.tensor:
    """The token id of a row that has top_k or top_p. `total`: the weight of the whole row; `uniform`: its
    random number in [0, 1)."""
    head = _load_block(of, tl.arange(0, HELD))
    kept = _apply_limits(of, head, total, top_p, min_p, top_k, vocab, HELD)
    unit, sum_more = _weight_of_bits(kept.edge), kept.mass
    target = uniform * (sum_more + tl.where(kept.ties > 0, kept.ties * unit, 0.0))
    value, most = kept.edge, kept.ties
    if (kept.ties == 0) | (target < sum_more):
        value = _search_threshold(of, head, target, "more", HELD)
        most, sum_same = _mass_above(of, head, value, HELD)
        more, sum_more = _mass_above(of, head, value + 1, HELD)
        most -= more
        unit = _weight_of_bits(value)
    nth = tl.minimum(tl.maximum(tl.floor((target - sum_more) / unit), 0.0), (most - 1).to(tl.float64))
    return _nth_of_value(of, head, value, nth.to(tl.int32), HELD)
