"""Experts on the card with torch's own matrix products: a pair for each expert that any token chose.

It reads from the device how many tokens each expert has, so a step with experts waits for the device once a layer, and cannot be
captured; a grouped kernel is to replace `apply`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.devices.base import Quantized
from runtime.devices.cuda.kernels.activation import act_and_mul
from runtime.devices.cuda.ops import NO_SCHEMES
from runtime.errors import ModelError
from runtime.layers.routing import route
from runtime.models.sparse import Routing

Packed = tuple[Tensor, Tensor]


class CudaExperts:
    """See devices/base.py for what each one means."""

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        return route(logits, bias, routing)

    def pack(self, gate_up: Tensor, down: Tensor) -> Packed:
        return gate_up, down

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> Packed:
        raise ModelError(NO_SCHEMES)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: Packed) -> Tensor:
        """Sums in float32 and in the order of the experts, so that a token's sum does not depend on its company."""
        gate_up, down = packed
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        chosen = expert_ids.flatten()
        order = chosen.argsort(stable=True)
        tokens, shares = order // expert_ids.shape[1], weights.flatten().index_select(0, order).unsqueeze(1)
        counts = torch.bincount(chosen.clamp(-1, len(down)) + 1, minlength=len(down) + 2).tolist()
        at = counts[0]  # those before and after the experts of this rank are other ranks'
        for expert, count in enumerate(counts[1:-1]):
            if count:
                rows = tokens[at : at + count]
                inner = act_and_mul(F.linear(x.index_select(0, rows), gate_up[expert]), "silu")
                out.index_add_(0, rows, F.linear(inner, down[expert]) * shares[at : at + count])
                at += count
        return out.to(x.dtype)
