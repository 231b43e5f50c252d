"""Mixture of experts on a GPU: grouped matrix products in Triton. The host reads nothing, so a step with
experts can be captured.

A layer is five launches: the router, one that aligns slots by expert (two with many slots, none with the
fewest), the gated product, the down product, and the sum of each token; quantizing activations takes two
more.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cuda.gemm import grouped_gemm
from runtime.devices.cuda.gemm_tiles import SINGLE_SLOTS, rows_of
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kernels.moe_permute import moe_align_block_size, moe_sum_reduce
from runtime.devices.cuda.kernels.moe_routing import route
from runtime.devices.cuda.options import KernelFusion
from runtime.devices.cuda.weights import PackedWeight, pack, pack_dense
from runtime.devices.torch_rearranged import rearranged_tensors
from runtime.models.config.moe_config import Routing

ExpertWeights = tuple[PackedWeight, PackedWeight]


class CudaExperts:
    """Experts (devices/base.py) in Triton."""

    def __init__(self, gpu: Gpu, fusion: KernelFusion = "safe") -> None:
        self.gpu = gpu
        self.fusion = fusion

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """Expert ids and weights of each token; see Experts.route."""
        return route(logits, bias, routing)

    def pack(self, gate_up: Tensor, down: Tensor) -> ExpertWeights:
        """Weights in full."""
        return pack_dense(gate_up), pack_dense(down)

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> ExpertWeights:
        """Quantized weights. Raises ModelError for a shape that no kernel takes."""
        return pack(gate_up), pack(down)

    def rearranged(
        self, packed: ExpertWeights, added: ExpertWeights | None, order: Sequence[int]
    ) -> ExpertWeights:
        """See Experts.rearranged."""
        found: ExpertWeights = rearranged_tensors(packed, added, order)
        return found

    def apply(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: ExpertWeights, first: int | None = None
    ) -> Tensor:
        """The experts' weighted sum for each token [T, hidden]; see Experts.apply. Sums are float32 in the
        order of the token's expert ids, so they do not depend on the batch."""
        own = expert_ids - first if first else expert_ids
        return self._sum(x, own, weights, packed, None)

    def apply_added(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        packed: ExpertWeights,
        added: Callable[[], Tensor],
        first: int | None = None,
    ) -> Tensor:
        """See AddingExperts.apply_added. To the bit as one after the other."""
        if self.fusion == "off" or expert_ids.numel() == 0:
            return self.apply(x, expert_ids, weights, packed, first).add_(added())
        own = expert_ids - first if first else expert_ids
        return self._sum(x, own, weights, packed, added)

    def _sum(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        packed: ExpertWeights,
        added: Callable[[], Tensor] | None,
    ) -> Tensor:
        gate_up, down = packed
        num_slots, num_experts = expert_ids.numel(), len(gate_up.weight)
        if num_slots == 0:
            return torch.zeros_like(x)
        ids = expert_ids.contiguous()
        size = 0 if num_slots <= SINGLE_SLOTS else rows_of(-(-num_slots // num_experts), self.gpu)
        tiles = moe_align_block_size(ids, num_experts, size, fuses=self.fusion != "off")
        inner = grouped_gemm(x, gate_up, tiles, ids, ids.shape[1], self.gpu, is_gated=True)
        slots = grouped_gemm(inner, down, tiles, ids, 1, self.gpu, is_gated=False)
        other = None if added is None else added()
        return moe_sum_reduce(slots, ids, weights.contiguous(), num_experts, other)
