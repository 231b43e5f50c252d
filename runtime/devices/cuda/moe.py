"""Mixture of experts on a GPU: grouped matrix products in Triton. The host reads nothing, so a step with
experts can be captured.

A layer is five launches: the router, one that aligns slots by expert (two with many slots, none with the
fewest), the gated product, the down product, and the sum of each token; quantizing activations takes two
more. With many slots torch's grouped product may have experts in 16 bits (gemm_tiles.TORCH_GROUPED_FROM).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from runtime.devices.base import Quantized
from runtime.devices.cuda.fragments import MOST_EXPONENT
from runtime.devices.cuda.gemm import grouped_gemm
from runtime.devices.cuda.gemm_tiles import SINGLE_SLOTS, TORCH_GROUPED_FROM, rows_of
from runtime.devices.cuda.kernels.activation import act_and_mul
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kernels.moe_permute import ExpertTiles, moe_align_block_size, moe_sum_reduce
from runtime.devices.cuda.kernels.moe_routing import route, route_aligned, slots_aligned
from runtime.devices.cuda.options import KernelFusion
from runtime.devices.cuda.weights import PackedWeight, pack, pack_dense, pack_mxfp4
from runtime.devices.operands import CodedStack
from runtime.devices.torch_rearranged import rearranged_tensors
from runtime.layers.quantization.mxfp4 import GROUP, dequantized
from runtime.models.config.moe_config import Routing

ExpertWeights = tuple[PackedWeight, PackedWeight]


def route_counter(torch_device: torch.device, *, are_all_here: bool, fusion: KernelFusion) -> Tensor | None:
    """By what the programs of a routing count themselves, where the last one aligns slots: where experts are
    all on this rank, at places of their own numbers. 0 between launches."""
    is_used = are_all_here and fusion == "all"
    return torch.zeros(1, dtype=torch.int32, device=torch_device) if is_used else None


class CudaExperts:
    """Experts (devices/base.py) in Triton."""

    def __init__(
        self,
        gpu: Gpu,
        fusion: KernelFusion = "safe",
        grouped_from: int | None = TORCH_GROUPED_FROM,
        counter: Tensor | None = None,
    ) -> None:
        """`fusion`: see KernelFusion. `grouped_from`: as gemm_tiles.TORCH_GROUPED_FROM. `counter`: by which
        the last program of a routing aligns few slots (`route_counter`); None: in a launch of its own."""
        self.gpu = gpu
        self.fusion = fusion
        self.grouped_from = grouped_from
        self.counter = counter
        self.aligned: tuple[Tensor, ExpertTiles] | None = None  # ids that were routed last, and their tiles

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """Expert ids and weights of each token; see Experts.route. Few slots are aligned at once, for experts
        that are all here."""
        num_slots, num_experts = len(logits) * routing.top_k, logits.shape[1]
        size = self._tile_size(num_slots, num_experts)
        if self.counter is None or not size or num_slots > slots_aligned(num_experts):
            return route(logits, bias, routing)
        ids, weights, tiles = route_aligned(logits, bias, routing, size, self.counter)
        self.aligned = ids, tiles
        return ids, weights

    def _tile_size(self, num_slots: int, num_experts: int) -> int:
        """Slots of a tile; 0: one, which need not be aligned."""
        return 0 if num_slots <= SINGLE_SLOTS else rows_of(-(-num_slots // num_experts), self.gpu)

    def _tiles(self, ids: Tensor, num_experts: int) -> ExpertTiles:
        """Slots of `ids` by expert: those that were aligned when these very ids were routed, or new ones."""
        size, aligned, self.aligned = self._tile_size(ids.numel(), num_experts), self.aligned, None
        if aligned is not None and aligned[0] is ids and aligned[1].size == size:
            return aligned[1]
        return moe_align_block_size(ids, num_experts, size, fuses=self.fusion != "off")

    def pack(self, gate_up: Tensor, down: Tensor) -> ExpertWeights:
        """Weights in full."""
        return pack_dense(gate_up), pack_dense(down)

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> ExpertWeights:
        """Quantized weights. Raises ModelError for a shape that no kernel takes."""
        return pack(gate_up), pack(down)

    def pack_clamped(self, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor]) -> ExpertWeights:
        """See ClampedExperts.pack_clamped."""
        first = pack_dense(gate_up.contiguous(), biases[0], "clamped")
        return first, pack_dense(down.contiguous(), biases[1])

    @property
    def packs_mxfp4(self) -> bool:
        """In all dtypes."""
        return True

    def pack_clamped_mxfp4(
        self, gate_up: CodedStack, down: CodedStack, biases: tuple[Tensor, Tensor]
    ) -> ExpertWeights:
        """See ClampedExperts.pack_clamped_mxfp4. Experts with larger scales than fragments have, which no
        known checkpoint has, become plain numbers."""
        if max(int(exponents.max()) for _, exponents in (gate_up, down)) > MOST_EXPONENT:
            stacks = ((codes.unflatten(2, (-1, GROUP // 2)), scales) for codes, scales in (gate_up, down))
            plain = (dequantized(*stack).to(biases[0].dtype) for stack in stacks)
            return self.pack_clamped(*plain, biases)
        return pack_mxfp4(gate_up, biases[0], "clamped"), pack_mxfp4(down, biases[1], "silu")

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
        if self.takes_grouped(x, num_slots, packed):
            slots = grouped_by_torch(x, ids, packed)
            other = None if added is None else added()
            return moe_sum_reduce(slots, ids, weights.contiguous(), num_experts, other)
        tiles = self._tiles(ids, num_experts)
        inner = grouped_gemm(x, gate_up, tiles, ids, ids.shape[1], self.gpu, gate=gate_up.gate)
        slots = grouped_gemm(inner, down, tiles, ids, 1, self.gpu, gate="")
        other = None if added is None else added()
        return moe_sum_reduce(slots, ids, weights.contiguous(), num_experts, other)

    def takes_grouped(self, x: Tensor, num_slots: int, packed: ExpertWeights) -> bool:
        """Whether torch's grouped product computes so many slots: of 16-bit numbers, in rows whose bytes are
        multiples of 16."""
        if self.grouped_from is None or num_slots < self.grouped_from * len(packed[0].weight):
            return False
        is_plain = all(
            one.kind == "plain" and one.biases is None and one.ins % 8 == one.outs % 8 == 0 for one in packed
        )
        return is_plain and x.dtype == torch.bfloat16


def grouped_by_torch(x: Tensor, ids: Tensor, packed: ExpertWeights) -> Tensor:
    """What experts make of each slot, [T * k, hidden], of x [T, hidden] and ids int64 [T, k]; rows of other
    ranks' experts are undefined. Slots are sorted by expert, and the host knows nothing of their numbers."""
    gate_up, down = packed
    num_experts, flat = len(gate_up.weight), ids.flatten()
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    known, order = keys.sort(stable=True)
    experts = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(known, experts, right=True, out_int32=True)
    rows = x.index_select(0, order // ids.shape[1])
    inner = act_and_mul(grouped_mm(rows, gate_up.weight.transpose(1, 2), offs=ends), "silu")
    found = grouped_mm(inner, down.weight.transpose(1, 2), offs=ends)
    return torch.empty_like(found).index_copy_(0, order, found)
