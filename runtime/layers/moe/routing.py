"""Routing of tokens to experts in plain torch: what Experts.route of devices/base.py computes on devices
without a kernel for it, and sparsemixer, for which no device has one."""

import torch
from torch import Tensor

from runtime.models.config.moe_config import Routing


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Router logits, float32 [T, experts] -> expert ids int64 [T, k] and their weights, float32 [T, k].
    `bias` [experts] counts when experts are chosen, and not in their weights."""
    scores = logits.softmax(1) if routing.score == "softmax" else logits.sigmoid()
    biased = scores if bias is None else scores + bias
    if routing.num_groups > routing.top_groups:
        grouped = biased.unflatten(1, (routing.num_groups, -1))  # [T, groups, experts of a group]
        best = (
            grouped.topk(1 if routing.group_score == "largest" else 2)
            .values.sum(2)
            .topk(routing.top_groups)
            .indices
        )
        is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(
            1, best, False
        )
        biased = grouped.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)
    ids = biased.topk(routing.top_k).indices
    weights = scores.gather(1, ids)
    if routing.normalizes:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids, weights * routing.scale


def sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Router logits, float32 [T, experts] -> ids int64 [T, 2] of the two largest, and their weights, float32
    [T, 2] (Liu et al., 2024, without what only training needs).

    The weight of an expert is its softmax among the experts near it: those whose logit s is at most 2 *
    `jitter` below its own, m, as a share of max(|s|, m). The first expert is not among those of the second.
    """
    best, left = [], logits
    for _ in range(2):
        most, expert = left.max(1, keepdim=True)
        is_far = (most - logits) / logits.abs().clamp(min=most) > 2 * jitter
        weight = left.masked_fill(is_far, -torch.inf).softmax(1).gather(1, expert)
        best.append((expert, weight))
        left = left.scatter(1, expert, -torch.inf)
    ids, weights = zip(*best, strict=True)
    return torch.cat(ids, 1), torch.cat(weights, 1)
