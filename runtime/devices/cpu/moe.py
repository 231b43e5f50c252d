"""Experts on the cpu: a pair of GEMMs for each expert that some token is routed to."""

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.quantized import entry
from runtime.layers.moe.routing import route
from runtime.models.config.moe_config import Routing

# packed weights of one expert: gate and up, then down
ExpertWeights = tuple[Tensor | Quantized, Tensor | Quantized]


class CpuExperts:
    """Experts (devices/base.py) in plain torch."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """See Experts.route."""
        return route(logits, bias, routing)

    def pack(self, gate_up: Tensor, down: Tensor) -> list[ExpertWeights]:
        """A pair of packed weights for each expert."""
        return [
            (self.ops.pack_linear(first), self.ops.pack_linear(second))
            for first, second in zip(gate_up, down, strict=True)
        ]

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> list[ExpertWeights]:
        """A pair of quantized weights for each expert."""
        return [(entry(gate_up, i), entry(down, i)) for i in range(len(gate_up.weight))]

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: list[ExpertWeights]) -> Tensor:
        """See Experts.apply."""
        return apply(self.ops, x, expert_ids, weights, packed)


def apply(ops: CpuOps, x: Tensor, ids: Tensor, weights: Tensor, experts: list[ExpertWeights]) -> Tensor:
    """Sums in float32 and in the order of the experts, so that a token's sum does not depend on the other
    tokens."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    tokens, shares = order // ids.shape[1], weights.flatten().index_select(0, order).unsqueeze(1)
    counts = torch.bincount(flat.clamp(-1, len(experts)) + 1, minlength=len(experts) + 2).tolist()
    at = counts[0]  # skips experts of other ranks, whose ids are below 0 or too large
    for (gate_up, down), count in zip(experts, counts[1:-1], strict=True):
        if count:
            end = at + count
            rows = tokens[at:end]
            inner = ops.act_and_mul(ops.linear(x.index_select(0, rows), gate_up, None), "silu")
            out.index_add_(0, rows, ops.linear(inner, down, None) * shares[at:end])
            at = end
    return out.to(x.dtype)
