"""Experts on the card: grouped products in Triton. Nothing is read by the host, so a step with experts can be
captured.

A layer is six launches: the router, two that list the slots by their experts, the gated product of gates and
ups, the product down, and the sum of each token; rounding activations takes two more.
"""

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cuda.gemm import products
from runtime.devices.cuda.gemm_tiles import SINGLE_SLOTS, rows_of
from runtime.devices.cuda.kernels.launch import Card
from runtime.devices.cuda.kernels.moe_permute import join, spread
from runtime.devices.cuda.kernels.moe_routing import route
from runtime.devices.cuda.weights import Packed, pack, plain
from runtime.models.moe_config import Routing

Pair = tuple[Packed, Packed]


class CudaExperts:
    """See devices/base.py for what each one means."""

    def __init__(self, card: Card) -> None:
        self.card = card

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        return route(logits, bias, routing)

    def pack(self, gate_up: Tensor, down: Tensor) -> Pair:
        return plain(gate_up), plain(down)

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> Pair:
        return pack(gate_up), pack(down)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: Pair) -> Tensor:
        """Sums in float32 and in the order of a token's choices, so that they do not depend on its
        company."""
        gate_up, down = packed
        num_slots, num_experts = expert_ids.numel(), len(gate_up.weight)
        if num_slots == 0:
            return torch.zeros_like(x)
        ids = expert_ids.contiguous()
        size = 0 if num_slots <= SINGLE_SLOTS else rows_of(-(-num_slots // num_experts), self.card)
        tiles = spread(ids, num_experts, size)
        inner = products(x, gate_up, tiles, ids, ids.shape[1], self.card, is_gated=True)
        return join(
            products(inner, down, tiles, ids, 1, self.card, is_gated=False),
            ids,
            weights.contiguous(),
            num_experts,
        )
