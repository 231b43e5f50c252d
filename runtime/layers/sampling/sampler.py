"""From logits to tokens: a chain of pure functions on rows of logits, in plain torch.

    penalties       penalties, logit bias, bans of stop ids below the minimum length    (penalties.py)
    token_bans      bans of bad words, and of tokens that are not allowed               (token_bans.py)
    mask            bans of tokens that a grammar does not allow                        (grammar_masks.py)
    sample_tokens   temperature, top_k, top_p, min_p, in this order; then one sample    (Ops.sample)
    logprobs        log probabilities of the logits before any of this

A token's random number is a pure function of the sequence's seed and the token's position, and a row's result
depends on that row alone: never on batch company, preemption or a restarted rank.

Logits that are not finite never stop a rank: NaN and -inf become -FAR, +inf becomes FAR. A row of nothing but
NaN is thus uniform: greedy takes token 0. What such a model says has no meaning, but the other requests never
notice.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from runtime.devices.sampling_inputs import SamplingInputs

FAR = 1e30  # stands for infinity: sums, differences and logarithms of it stay finite in float32
BANNED = -4 * FAR  # by a grammar: below everything else, also below stop ids before the minimum length
FEW = 4  # random numbers that Python computes
NUM_CANDIDATES = 256  # top_k and top_p are decided among so many where that is exact
LOWEST, TINY = -87.0, 2e-38  # exp(LOWEST) is a normal float32 below TINY

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


def clean(logits: Tensor) -> Tensor:
    """Makes float32 logits finite, in place."""
    return logits.nan_to_num_(nan=-FAR, posinf=FAR, neginf=-FAR)


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Ops.mask in plain torch: see devices/base.py."""
    ones = torch.ones(1, dtype=torch.int32, device=bits.device) << torch.arange(
        32, dtype=torch.int32, device=bits.device
    )
    allowed = (bits.unsqueeze(2) & ones).ne(0).flatten(1)[:, : logits.shape[1]]
    most = allowed.float().mul_(-2 * BANNED).add_(BANNED)
    if len(rows) == len(logits):  # the same rows, in the same order
        torch.minimum(logits, most, out=logits)
    else:
        logits[rows] = torch.minimum(logits[rows], most)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014) on int64, whose products wrap as uint64's
    do."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1 - 2^-52] for int64 seeds and positions: output number `position` of splitmix64 with a
    mixed seed."""
    bits = _mix(_mix(seeds) + (positions + 1) * _GAMMA)
    return _shift(bits, 12).double() * 2.0**-52


def host_uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`uniform` of int64 arrays on the host: a device is spared its many small steps. A few numbers take
    numpy ten times as long as Python."""
    if len(seeds) <= FEW:
        return np.array([_uniform_of(*pair) for pair in zip(seeds.tolist(), positions.tolist(), strict=True)])

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1 & _MASK64)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2 & _MASK64)
        return x ^ (x >> np.uint64(31))

    steps = (positions + 1).astype(np.uint64) * np.uint64(_GAMMA & _MASK64)
    bits = mix(mix(seeds.astype(np.uint64)) + steps)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _uniform_of(seed: int, position: int) -> float:
    bits = _mix_int(_mix_int(seed & _MASK64) + (position + 1) * (_GAMMA & _MASK64) & _MASK64)
    return (bits >> 12) * 2.0**-52


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * (_MIX_1 & _MASK64) & _MASK64
    x = (x ^ x >> 27) * (_MIX_2 & _MASK64) & _MASK64
    return x ^ x >> 31


def sample_tokens(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """A token id, int64 [N], for each row of finite float32 logits [N, V]. Reads the device: which rows need
    which path.

    Rows without top_k and top_p are sampled in the order of the vocabulary, the others from the largest
    probability down: first among the NUM_CANDIDATES largest, then, where these do not reach top_p or top_k,
    from all of them sorted.
    """
    vocab = logits.shape[1]
    is_random = inputs.temperature > 0
    is_cut = ((inputs.top_k > 0) & (inputs.top_k < vocab)) | (inputs.top_p < 1)
    plain, cut = _where(is_random & ~is_cut), _where(is_random & is_cut)
    is_greedy_somewhere = len(plain) + len(cut) < len(logits)  # argmax takes the cpu as long as sampling
    tokens = (
        logits.argmax(dim=1)
        if is_greedy_somewhere
        else torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    )
    if len(plain):
        weights, min_p = _weights(logits, inputs, plain), inputs.min_p[plain, None]
        if min_p.any():
            # floats: products with a mask of bools measured six times slower on the cpu
            weights *= (weights >= min_p).float()
        tokens[plain] = _invert(weights, inputs.uniform[plain])
    if len(cut):
        tokens[cut] = _sample_filtered(logits, inputs, cut)
    return tokens


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)


def _weights(logits: Tensor, inputs: SamplingInputs, rows: Tensor) -> Tensor:
    """exp((logit - max) / temperature), float32: probabilities up to a factor, the largest being 1; those
    below TINY are 0.

    Bounded first, because exp of what has no normal result, such as a banned token's, takes the cpu ten times
    as long.
    """
    rows_logits = logits.index_select(0, rows)
    powers = ((rows_logits - rows_logits.amax(dim=1, keepdim=True)) / inputs.temperature[rows, None]).clamp_(
        min=LOWEST
    )
    return torch.threshold_(powers.exp_(), TINY, 0.0)


def _sample_filtered(logits: Tensor, inputs: SamplingInputs, rows: Tensor) -> Tensor:
    weights = _weights(logits, inputs, rows)
    totals = weights.sum(dim=1, dtype=torch.float64)
    values, ids = weights.topk(min(NUM_CANDIDATES, weights.shape[1]), dim=1)
    width = values.shape[1]
    top_k, top_p = inputs.top_k[rows], inputs.top_p[rows]
    is_by_k = (top_k > 0) & (top_k <= width)
    is_enough = is_by_k | ((top_k == 0) & (values.sum(dim=1, dtype=torch.float64) >= top_p * totals))
    tokens = _sample_sorted(values, ids, totals, inputs, rows)
    rest = _where(~is_enough)
    if len(rest):
        values, ids = weights[rest].sort(dim=1, descending=True, stable=True)
        tokens[rest] = _sample_sorted(values, ids, totals[rest], inputs, rows[rest])
    return tokens


def _sample_sorted(
    values: Tensor, ids: Tensor, totals: Tensor, inputs: SamplingInputs, rows: Tensor
) -> Tensor:
    """Samples from weights in falling order; `totals` is their sum with those that are not among them."""
    kept = _kept(values, totals, inputs, rows)
    return ids.gather(1, _invert(kept, inputs.uniform[rows]).unsqueeze(1)).squeeze(1)


def _kept(values: Tensor, totals: Tensor, inputs: SamplingInputs, rows: Tensor) -> Tensor:
    """Weights in falling order, float64: 0 for those that top_k, top_p and min_p leave out."""
    top_k, top_p = inputs.top_k[rows], inputs.top_p[rows].double()
    places = torch.arange(values.shape[1], device=values.device)
    is_in_k = (places < top_k.unsqueeze(1)) | (top_k == 0).unsqueeze(1)
    kept = values.double() * is_in_k
    sums = kept.cumsum(dim=1)
    mass = torch.where(top_k > 0, sums[:, -1], totals) * top_p
    is_in_p = (sums - kept < mass.unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    is_in_p[:, 0] = True
    return kept * is_in_p * (values >= inputs.min_p[rows].unsqueeze(1))


def token_chances(logits: Tensor, inputs: SamplingInputs, rows: Tensor, tokens: Tensor) -> Tensor:
    """The probability, float64 [M], with which `sample_tokens` finds each of `tokens`, int64 [M], in the rows
    `rows`, int64 [M], of finite float32 logits [N, V]. Of rows with temperature 0 it means nothing."""
    heated = replace(inputs, temperature=torch.where(inputs.temperature > 0, inputs.temperature, 1.0))
    weights = _weights(logits, heated, rows)
    if inputs.largest_k == 0 and not inputs.has_top_p:
        kept = weights.double() * (weights >= inputs.min_p[rows, None])
    else:
        values, ids = weights.sort(dim=1, descending=True, stable=True)
        totals = weights.sum(dim=1, dtype=torch.float64)
        kept = torch.zeros_like(values, dtype=torch.float64)
        kept.scatter_(1, ids, _kept(values, totals, inputs, rows))
    return kept.gather(1, tokens.unsqueeze(1)).squeeze(1) / kept.sum(dim=1)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the distribution function: the first place where the running sum passes uniform * total.
    Sums in float64."""
    sums = weights.cumsum(dim=1, dtype=torch.float64)
    # below the total, see `uniform`; so the place has a weight above 0
    targets = (uniforms * sums[:, -1]).unsqueeze(1)
    return torch.searchsorted(sums, targets, right=True).squeeze(1)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """float32 [n], int32 [n, width] and float32 [n, width]."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs(logits: Tensor, targets: Tensor, width: int) -> Logprobs:
    """Log probabilities of `targets` (int64 [n]) and of the `width` likeliest tokens under finite logits [n,
    V]."""
    norm = logits.logsumexp(dim=1, keepdim=True)
    top, ids = logits.topk(min(width, logits.shape[1]), dim=1)
    return Logprobs((logits.gather(1, targets.unsqueeze(1)) - norm).squeeze(1), ids.int(), top - norm)
