"""From logits to tokens on Ascend, without a look at the device: every row goes through the same operators, and those that a row does not
want leave it as it is. What no row wants is not called, which the host knows.

The draw is layers/sampler.py's: the row's random number against the running sum of its weights. Weights stay in the order of the
vocabulary here, because the fused filter returns them so; on the cpu, rows with top_k or top_p are drawn from the largest down. So the
same seed may give another token than there, of the same distribution, and always the same one here. Ties at the edge of top_k stay all
in. Sums are float32, as NPUs have no fast float64.
"""

import torch
import torch_npu
from torch import Tensor

from runtime.devices.base import Draw

MOST_K = 1024  # that the fused filter takes
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1: a product with it is less than the other factor


def choose(logits: Tensor, draw: Draw) -> Tensor:
    """A token id, int64 [N], for each row of finite float32 logits [N, V]."""
    best, greedy = logits.max(dim=1, keepdim=True)
    is_random = draw.temperature > 0
    scaled = (logits - best) / torch.where(is_random, draw.temperature, 1.0).unsqueeze(1)
    weights = _filtered(scaled, draw).exp()  # the largest is 1
    weights = weights * (weights >= draw.min_p.unsqueeze(1))
    sums = weights.cumsum(dim=1)
    targets = draw.uniform.float().clamp(max=BELOW_ONE).unsqueeze(1) * sums[:, -1:]
    is_beyond = (sums > targets) & (weights > 0)  # a sum in float32 may waver where weights are 0
    first = is_beyond.float().max(dim=1)
    return torch.where(is_random & (first.values > 0), first.indices, greedy.squeeze(1))


def _filtered(scaled: Tensor, draw: Draw) -> Tensor:
    """-inf where top_k, then top_p leave a token out."""
    if draw.largest_k > MOST_K:
        scaled = _sorted_by_k(scaled, draw.top_k)
    elif draw.largest_k > 0:
        k = draw.top_k.clamp(1, min(MOST_K, scaled.shape[1])).int()
        scaled = torch.where((draw.top_k > 0).unsqueeze(1), torch_npu.npu_top_k_top_p(scaled, None, k), scaled)
    if draw.has_top_p:
        scaled = torch.where((draw.top_p < 1).unsqueeze(1), torch_npu.npu_top_k_top_p(scaled, draw.top_p, None), scaled)
    return scaled


def _sorted_by_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """For any top_k, at the price of a whole sort."""
    ordered = scaled.sort(dim=1, descending=True).values
    least = ordered.gather(1, top_k.clamp(1, scaled.shape[1]).unsqueeze(1) - 1)
    return scaled.masked_fill((scaled < least) & (top_k > 0).unsqueeze(1), -torch.inf)
