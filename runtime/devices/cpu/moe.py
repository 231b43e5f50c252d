"""Experts on the cpu: one pair of matrix products for each expert that any token chose."""

from typing import Any

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.quantized import entry
from runtime.layers.moe.routing import route
from runtime.models.moe_config import Routing


class CpuExperts:
    """See devices/base.py for what each one means."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        return route(logits, bias, routing)

    def pack(self, gate_up: Tensor, down: Tensor) -> list[tuple[Any, Any]]:
        return [
            (self.ops.pack_linear(first), self.ops.pack_linear(second))
            for first, second in zip(gate_up, down, strict=True)
        ]

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> list[tuple[Quantized, Quantized]]:
        return [(entry(gate_up, i), entry(down, i)) for i in range(len(gate_up.weight))]

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: list[tuple[Any, Any]]) -> Tensor:
        return apply(self.ops, x, expert_ids, weights, packed)


def apply(ops: CpuOps, x: Tensor, ids: Tensor, weights: Tensor, experts: list[tuple[Any, Any]]) -> Tensor:
    """Sums in float32 and in the order of the experts, so that a token's sum does not depend on its
    company."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    tokens, shares = order // ids.shape[1], weights.flatten().index_select(0, order).unsqueeze(1)
    counts = torch.bincount(chosen.clamp(-1, len(experts)) + 1, minlength=len(experts) + 2).tolist()
    at = counts[0]  # those before and after the experts of this rank are other ranks'
    for (gate_up, down), count in zip(experts, counts[1:-1], strict=True):
        if count:
            end = at + count
            rows = tokens[at:end]
            inner = ops.act_and_mul(ops.linear(x.index_select(0, rows), gate_up, None), "silu")
            out.index_add_(0, rows, ops.linear(inner, down, None) * shares[at:end])
            at = end
    return out.to(x.dtype)
