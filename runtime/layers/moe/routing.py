"""Which experts a token goes to, in plain torch: what Experts.route of devices/base.py is on devices without
a kernel for it."""

import torch
from torch import Tensor

from runtime.models.moe_config import Routing


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """float32 [T, experts] -> experts int64 [T, k], weights float32 [T, k]."""
    scores = logits.softmax(1) if routing.score == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.num_groups > routing.top_groups:
        members = choice.unflatten(1, (routing.num_groups, -1))  # [T, groups, experts of one]
        best = (
            members.topk(1 if routing.group_score == "largest" else 2)
            .values.sum(2)
            .topk(routing.top_groups)
            .indices
        )
        is_out = torch.ones(members.shape[:2], dtype=torch.bool, device=logits.device).scatter_(
            1, best, False
        )
        choice = members.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k).indices
    weights = scores.gather(1, ids)
    if routing.normalizes:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids, weights * routing.scale
