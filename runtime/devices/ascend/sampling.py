"""From logits to tokens on Ascend, without a look at the device: every row goes through the same operators,
and those that a row does not want leave it as it is. What no row wants is not called, which the host knows.
So a choice can be captured.

The draw is layers/sampling/sampler.py's: the row's random number against the running sum of its weights. Two
ways to what is summed:

    by_filter  the fused filter, which returns weights in the order of the vocabulary. On the cpu, rows with top_k or top_p are drawn from
               the largest down; so the same seed may give another token than there, of the same distribution, and always the same one
               here. Ties at the edge of top_k stay all in. A top_k above its limit sorts.
    by_sort    one sort of the whole vocabulary, where some row has top_k or top_p: the tokens of the cpu

Sums are float32, as NPUs have no fast float64.
"""

from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.facts import MOST_K
from runtime.devices.base import SamplingInputs

BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1: a product with it is less than the other factor


Cut = Callable[[Tensor, SamplingInputs], tuple[Tensor, Tensor | None]]


def choose(logits: Tensor, draw: SamplingInputs, cut: Cut) -> Tensor:
    """A token id, int64 [N], for each row of finite float32 logits [N, V]."""
    best, greedy = logits.max(dim=1, keepdim=True)
    is_random = (draw.temperature > 0).unsqueeze(1)
    scaled = (logits - best) / torch.where(is_random, draw.temperature.unsqueeze(1), 1.0)
    weights, ids = cut(scaled, draw)
    weights = weights * (weights >= draw.min_p.unsqueeze(1))
    sums = weights.cumsum(dim=1)
    targets = draw.uniform.float().clamp(max=BELOW_ONE).unsqueeze(1) * sums[:, -1:]
    is_beyond = (sums > targets) & (weights > 0)  # a sum in float32 may waver where weights are 0
    found, places = is_beyond.float().max(dim=1, keepdim=True)
    tokens = places if ids is None else ids.gather(1, places)
    return torch.where(is_random & (found > 0), tokens, greedy).squeeze(1)


def by_filter(scaled: Tensor, draw: SamplingInputs) -> tuple[Tensor, None]:
    """Weights, of which the largest is 1; 0 where top_k, then top_p leave a token out."""
    if draw.largest_k > MOST_K:
        scaled = _sorted_by_k(scaled, draw.top_k)
    elif draw.largest_k > 0:
        k = draw.top_k.clamp(1, min(MOST_K, scaled.shape[1])).int()
        scaled = torch.where(
            (draw.top_k > 0).unsqueeze(1), torch_npu.npu_top_k_top_p(scaled, None, k), scaled
        )
    if draw.has_top_p:
        scaled = torch.where(
            (draw.top_p < 1).unsqueeze(1), torch_npu.npu_top_k_top_p(scaled, draw.top_p, None), scaled
        )
    return scaled.exp(), None


def by_sort(scaled: Tensor, draw: SamplingInputs) -> tuple[Tensor, Tensor | None]:
    """The same, and the tokens that they belong to: of rows with top_k or top_p from the largest down."""
    weights = scaled.exp()
    if draw.largest_k == 0 and not draw.has_top_p:
        return weights, None
    vocab, top_k, top_p = scaled.shape[1], draw.top_k.unsqueeze(1), draw.top_p.unsqueeze(1)
    values, ids = weights.sort(dim=1, descending=True, stable=True)
    places = torch.arange(vocab, device=scaled.device)
    kept = values * ((places < top_k) | (top_k == 0))
    sums = kept.cumsum(dim=1)
    kept = kept * ((places == 0) | (sums - kept < top_p * sums[:, -1:]) | (top_p >= 1))
    is_cut = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
    return torch.where(is_cut, kept, weights), torch.where(is_cut, ids, places)


CUTS: dict[str, Cut] = {"ascend": by_filter, "pytorch": by_sort}  # of --sampling-backend


def _sorted_by_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """For any top_k, at the price of a whole sort."""
    ordered = scaled.sort(dim=1, descending=True).values
    least = ordered.gather(1, top_k.clamp(1, scaled.shape[1]).unsqueeze(1) - 1)
    return scaled.masked_fill((scaled < least) & (top_k > 0).unsqueeze(1), -torch.inf)
