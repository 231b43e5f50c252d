"""Mixture of experts on Ascend: rows sorted by expert, grouped products, and the sum of each token. The host
reads nothing from the device.

    route       npu_moe_gating_top_k_softmax_v2 for softmax over the chosen experts, npu_moe_gating_top_k
                where it supports the model (`is_fused`); else torch's operators
    sort        npu_moe_init_routing_v2: a row for each slot, sorted by expert, and the counts of experts
    products    npu_grouped_matmul, twice, with npu_swiglu between, or npu_clipped_swiglu where experts have
                biases (gpt-oss); or as grouped_gemm.py has them
    sum         npu_moe_finalize_routing: each token's rows times its weights, and the shared experts' output

The number of rows of an expert stays on the device, so a step with experts can be captured. Slots of other
ranks' experts get no row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.formats import to_nz
from runtime.devices.ascend.grouped_gemm import QuantizedExperts, grouped_matmul, pack_quantized
from runtime.devices.ascend.quantized import QuantizedInputs
from runtime.devices.base import Quantized
from runtime.devices.operands import CodedStack
from runtime.devices.torch_rearranged import rearranged_tensors
from runtime.layers.moe.routing import route
from runtime.models.config.moe_config import Routing

MAX_EXPERTS, GROUP_TILE = (
    2048,
    32,
)  # of the gating operator: the most experts, with each group padded to tiles
# drop_pad_mode of npu_moe_finalize_routing for slots token by token. 2: rows [T * k, hidden], one for each
# slot; 3: rows [experts, capacity, hidden], none for a slot with -1. Of these sizes only the product matters
WHOLE_ROWS, SOME_ROWS = 2, 3
SCORES = ("softmax", "sigmoid")  # norm_type, by index
GROUP_SCORES = ("largest", "two largest")  # group_select_mode, by index


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Weights in full; see grouped_gemm.py for the methods."""

    gate_up: Tensor  # [E, hidden, 2 * inner]
    down: Tensor  # [E, inner, hidden]

    def __len__(self) -> int:
        return len(self.down)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x as it is."""
        return x, None

    def forward(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Feed-forward of rows [N, hidden], counts[e] of them for expert e -> [N, hidden]."""
        inner = torch_npu.npu_swiglu(grouped_matmul(rows, self.gate_up, counts), dim=-1)
        return grouped_matmul(inner, self.down, counts)


@dataclass(frozen=True, slots=True)
class BiasedExperts:
    """Weights in full, with biases, and a gate whose halves are clamped (gpt-oss, whose gain and limit are
    the operator's defaults); see grouped_gemm.py for the methods."""

    gate_up: Tensor  # [E, hidden, 2 * inner]
    down: Tensor  # [E, inner, hidden]
    gate_up_bias: Tensor  # [E, 2 * inner], of the dtype that `bias_dtype` says
    down_bias: Tensor  # [E, hidden]

    def __len__(self) -> int:
        return len(self.down)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x as it is."""
        return x, None

    def forward(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Feed-forward of rows [N, hidden], counts[e] of them for expert e -> [N, hidden]."""
        both = grouped_matmul(rows, self.gate_up, counts, bias=self.gate_up_bias)
        inner = torch_npu.npu_clipped_swiglu(both, dim=-1, interleaved=False)
        return grouped_matmul(inner, self.down, counts, bias=self.down_bias)


Packed = DenseExperts | BiasedExperts | QuantizedExperts


class AscendExperts:
    """Experts (devices/base.py) of one NPU."""

    def __init__(
        self, dtype: torch.dtype, *, num_groups: int, quantized: QuantizedInputs | None = None
    ) -> None:
        """`num_groups`: groups of ranks that whole experts are spread over. `quantized`: where quantized
        activations are kept for the shared experts; None: nowhere."""
        self.dtype = dtype
        self.num_groups = num_groups
        self.quantized = quantized

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """Expert ids [T, k], int32 or, where torch routes, int64, and weights float32 [T, k]; see
        Experts.route."""
        if normalizes_chosen(routing) and bias is None:
            weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits, k=routing.top_k, renorm=1)
            return ids, weights if routing.scale == 1.0 else weights * routing.scale
        if not is_fused(logits.shape[1], routing):
            return route(logits, bias, routing)
        has_groups = routing.num_groups > routing.top_groups
        # the operator normalizes weights for sigmoid only
        divides = routing.normalizes and routing.score == "softmax"
        weights, ids, _ = torch_npu.npu_moe_gating_top_k(
            logits,
            routing.top_k,
            bias=bias,
            k_group=routing.top_groups if has_groups else 1,
            group_count=routing.num_groups if has_groups else 1,
            group_select_mode=GROUP_SCORES.index(routing.group_score),
            norm_type=SCORES.index(routing.score),
            routed_scaling_factor=1.0 if divides else routing.scale,
        )
        if divides:
            weights = weights / weights.sum(1, keepdim=True)
            weights = weights if routing.scale == 1.0 else weights * routing.scale
        return ids, weights

    def pack(self, gate_up: Tensor, down: Tensor) -> DenseExperts:
        """Weights in full, transposed and in FRACTAL_NZ where possible."""
        return DenseExperts(
            to_nz(gate_up.transpose(1, 2).contiguous()), to_nz(down.transpose(1, 2).contiguous())
        )

    @property
    def packs_mxfp4(self) -> bool:
        """No: the operators of A2 and A3 multiply by int4 and int8, not by 4-bit floats."""
        return False

    def pack_clamped(self, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor]) -> BiasedExperts:
        """See ClampedExperts.pack_clamped."""
        plain = self.pack(gate_up, down)
        first, second = (bias.to(bias_dtype(gate_up.dtype)) for bias in biases)
        return BiasedExperts(plain.gate_up, plain.down, first, second)

    def pack_clamped_mxfp4(
        self, gate_up: CodedStack, down: CodedStack, biases: tuple[Tensor, Tensor]
    ) -> BiasedExperts:
        """See ClampedExperts.pack_clamped_mxfp4, which `packs_mxfp4` rules out."""
        raise AssertionError("experts in MXFP4 are read into plain numbers on an NPU")

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> QuantizedExperts:
        """Quantized weights. Raises ModelError for what the operators do not support."""
        return pack_quantized(gate_up, down, self.dtype)

    def rearranged(self, packed: Packed, added: Packed | None, order: Sequence[int]) -> Packed:
        """See Experts.rearranged."""
        found: Packed = rearranged_tensors(packed, added, order)
        return found

    def apply(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: Packed, first: int | None = None
    ) -> Tensor:
        """The experts' weighted sum for each token [T, hidden]; see Experts.apply."""
        return self._sum(x, expert_ids, weights, packed, first, None)

    def apply_added(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        packed: Packed,
        added: Callable[[], Tensor],
        first: int | None = None,
    ) -> Tensor:
        """See AddingExperts.apply_added."""
        return self._sum(x, expert_ids, weights, packed, first, added)

    def _sum(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        packed: Packed,
        first: int | None,
        added: Callable[[], Tensor] | None,
    ) -> Tensor:
        count = len(packed)
        num_ids, ids = count * self.num_groups, expert_ids
        if first is None and self.num_groups > 1:  # ids below 0 become some behind all experts: no rows
            num_ids *= 2
            ids = ids.remainder(num_ids)
        begin = first or 0
        inputs, scales = packed.quantize(x)
        if scales is not None and self.quantized is not None and added is not None:
            self.quantized.put(inputs, scales, x)
        rows, row_idx, counts, scales = torch_npu.npu_moe_init_routing_v2(
            inputs,
            ids.int(),
            scale=scales,
            expert_num=num_ids,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[begin, begin + count],
            quant_mode=-1,
            row_idx_type=0,
        )
        out = packed.forward(rows, scales, counts, x.dtype)
        # rows behind the last expert's are undefined, and no slot reads them: those without a row have -1
        mode = WHOLE_ROWS
        if self.num_groups > 1:
            out, mode = out.view(ids.shape[1], len(x), -1), SOME_ROWS
        other = None if added is None else added()
        return torch_npu.npu_moe_finalize_routing(
            out, other, None, None, weights.to(weights_dtype(x.dtype)), row_idx, None, drop_pad_mode=mode
        )


def weights_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of experts' weights in the operator that sums rows of `dtype`: CANN has float32 beside
    bfloat16 (ops-transformer, moe_finalize_routing_v2_def.cpp), else that of the rows."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of biases in the grouped product of rows of `dtype`."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def normalizes_chosen(routing: Routing) -> bool:
    """Whether weights are the softmax over the logits of the chosen experts, which are the largest ones."""
    has_groups = routing.num_groups > routing.top_groups
    return routing.score == "softmax" and routing.normalizes and not has_groups


def is_fused(num_experts: int, routing: Routing) -> bool:
    """Whether the gating operator supports this routing: its documented limits, and sigmoid only with
    normalization."""
    groups = routing.num_groups if routing.num_groups > routing.top_groups else 1
    of_group = num_experts // groups
    tiles = -(-of_group // GROUP_TILE) * GROUP_TILE * groups
    return (
        num_experts <= MAX_EXPERTS
        and of_group > 2
        and tiles <= MAX_EXPERTS
        and (routing.normalizes or routing.score == "softmax")
    )
