"""Sampling on Ascend. The host reads nothing from the device, so sampling can be captured: every row goes
through the same operators, and those that do not apply to a row leave it unchanged. Operators that apply to
no row are not called; the host knows that from the requests.

As in layers/sampling/sampler.py, a row's random number is compared with the running sum of its weights. Two
ways to filter the weights:

    filter_fused   the fused operator, which keeps weights in the order of the vocabulary. The cpu samples
                   rows with top_k or top_p from the largest weight down, so the same seed may give another
                   token here, of the same distribution, and always the same one. Ties at the edge of top_k
                   are all kept. A top_k above the operator's limit sorts.
    filter_sorted  one sort of the whole vocabulary, where some row has top_k or top_p: the cpu's tokens

Sums are float32, as NPUs have no fast float64.
"""

from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.facts import MAX_TOP_K
from runtime.devices.sampling_inputs import SamplingInputs

BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1: x * BELOW_ONE is below x

# (scaled logits, inputs) -> weights, and the token of each column where it is not the column itself
Filter = Callable[[Tensor, SamplingInputs], tuple[Tensor, Tensor | None]]


def sample(logits: Tensor, inputs: SamplingInputs, token_filter: Filter) -> Tensor:
    """A token id, int64 [N], for each row of finite float32 logits [N, V]."""
    best, greedy = logits.max(dim=1, keepdim=True)
    is_random = (inputs.temperature > 0).unsqueeze(1)
    scaled = (logits - best) / torch.where(is_random, inputs.temperature.unsqueeze(1), 1.0)
    weights, ids = token_filter(scaled, inputs)
    weights = weights * (weights >= inputs.min_p.unsqueeze(1))
    sums = weights.cumsum(dim=1)
    targets = inputs.uniform.float().clamp(max=BELOW_ONE).unsqueeze(1) * sums[:, -1:]
    exceeds_target = (sums > targets) & (weights > 0)  # a float32 sum may vary where weights are 0
    is_found, columns = exceeds_target.float().max(dim=1, keepdim=True)
    tokens = columns if ids is None else ids.gather(1, columns)
    return torch.where(is_random & (is_found > 0), tokens, greedy).squeeze(1)


def filter_fused(scaled: Tensor, inputs: SamplingInputs) -> tuple[Tensor, None]:
    """Weights, 1 for the largest logit; 0 for tokens that top_k or, after it, top_p excludes."""
    if inputs.largest_k > MAX_TOP_K:
        scaled = _sorted_by_k(scaled, inputs.top_k)
    elif inputs.largest_k > 0:
        k = inputs.top_k.clamp(1, min(MAX_TOP_K, scaled.shape[1])).int()
        scaled = torch.where(
            (inputs.top_k > 0).unsqueeze(1), torch_npu.npu_top_k_top_p(scaled, None, k), scaled
        )
    if inputs.has_top_p:
        scaled = torch.where(
            (inputs.top_p < 1).unsqueeze(1), torch_npu.npu_top_k_top_p(scaled, inputs.top_p, None), scaled
        )
    return scaled.exp(), None


def filter_sorted(scaled: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor | None]:
    """Weights and their tokens: rows with top_k or top_p are sorted from the largest weight down."""
    weights = scaled.exp()
    if inputs.largest_k == 0 and not inputs.has_top_p:
        return weights, None
    vocab, top_k, top_p = scaled.shape[1], inputs.top_k.unsqueeze(1), inputs.top_p.unsqueeze(1)
    values, ids = weights.sort(dim=1, descending=True, stable=True)
    columns = torch.arange(vocab, device=scaled.device)
    kept = values * ((columns < top_k) | (top_k == 0))
    sums = kept.cumsum(dim=1)
    kept = kept * ((columns == 0) | (sums - kept < top_p * sums[:, -1:]) | (top_p >= 1))
    is_cut = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
    return torch.where(is_cut, kept, weights), torch.where(is_cut, ids, columns)


FILTERS: dict[str, Filter] = {
    "ascend": filter_fused,
    "pytorch": filter_sorted,
}  # values of --sampling-backend


def _sorted_by_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Applies any top_k by sorting the whole vocabulary."""
    ordered = scaled.sort(dim=1, descending=True).values
    least = ordered.gather(1, top_k.clamp(1, scaled.shape[1]).unsqueeze(1) - 1)
    return scaled.masked_fill((scaled < least) & (top_k > 0).unsqueeze(1), -torch.inf)
