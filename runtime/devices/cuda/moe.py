"""Experts on the GPU: grouped products in Triton. Nothing is read by the host, so a step with experts can be
captured.

A layer is six launches: the router, two that list the slots by their experts, the gated product of gates and
ups, the product down, and the sum of each token; rounding activations takes two more.
"""

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cuda.gemm import grouped_gemm
from runtime.devices.cuda.gemm_tiles import SINGLE_SLOTS, rows_of
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kernels.moe_permute import moe_align_block_size, moe_sum_reduce
from runtime.devices.cuda.kernels.moe_routing import route
from runtime.devices.cuda.weights import PackedWeight, pack, pack_dense
from runtime.models.moe_config import Routing

ExpertWeights = tuple[PackedWeight, PackedWeight]


class CudaExperts:
    """See devices/base.py for what each one means."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        return route(logits, bias, routing)

    def pack(self, gate_up: Tensor, down: Tensor) -> ExpertWeights:
        return pack_dense(gate_up), pack_dense(down)

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> ExpertWeights:
        return pack(gate_up), pack(down)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: ExpertWeights) -> Tensor:
        """Sums in float32 and in the order of a token's choices, so that they do not depend on its
        company."""
        gate_up, down = packed
        num_slots, num_experts = expert_ids.numel(), len(gate_up.weight)
        if num_slots == 0:
            return torch.zeros_like(x)
        ids = expert_ids.contiguous()
        size = 0 if num_slots <= SINGLE_SLOTS else rows_of(-(-num_slots // num_experts), self.gpu)
        tiles = moe_align_block_size(ids, num_experts, size)
        inner = grouped_gemm(x, gate_up, tiles, ids, ids.shape[1], self.gpu, is_gated=True)
        return moe_sum_reduce(
            grouped_gemm(inner, down, tiles, ids, 1, self.gpu, is_gated=False),
            ids,
            weights.contiguous(),
            num_experts,
        )
