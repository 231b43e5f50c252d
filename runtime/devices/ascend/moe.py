"""Mixtures of experts on Ascend: rows sorted by expert, products in groups, and back, all of it without a
look at the device.

    route       npu_moe_gating_top_k, for what it has (`is_fused`); else torch's operators
    sort        npu_moe_init_routing_v2: a row for each choice, in the order of experts, and how many each has
    products    npu_grouped_matmul, twice, with npu_swiglu between
    sum         npu_moe_finalize_routing: each token's rows times its weights

How many rows an expert has stays on the device, so a step with experts can be captured. Choices of other
ranks' experts get no row.
"""

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.formats import in_tiles
from runtime.devices.ascend.grouped_gemm import Packed, grouped, pack_quantized
from runtime.devices.base import Quantized
from runtime.layers.moe.routing import route
from runtime.models.moe_config import Routing

MOST_EXPERTS, GROUP_TILE = 2048, 32  # of the gating operator: experts, with each group rounded up to the tile
SCORES = ("softmax", "sigmoid")  # norm_type, by index
GROUP_SCORES = ("largest", "two largest")  # group_select_mode, by index


@dataclass(frozen=True, slots=True)
class Plain:
    """Weights as they are."""

    gate_up: Tensor  # [E, hidden, 2 * inner]
    down: Tensor  # [E, inner, hidden]

    def __len__(self) -> int:
        return len(self.down)

    def prepared(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def products(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        inner = torch_npu.npu_swiglu(grouped(rows, self.gate_up, counts), dim=-1)
        return grouped(inner, self.down, counts)


class AscendExperts:
    """See devices/base.py for what each one means."""

    def __init__(self, dtype: torch.dtype, *, is_spread: bool = True) -> None:
        self.dtype = dtype
        self.is_spread = is_spread  # False: no token chooses an expert of another rank

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        if not is_fused(logits.shape[1], routing):
            return route(logits, bias, routing)
        has_groups = routing.num_groups > routing.top_groups
        # which the operator does for sigmoid alone
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
        return ids.long(), weights

    def pack(self, gate_up: Tensor, down: Tensor) -> Plain:
        return Plain(
            in_tiles(gate_up.transpose(1, 2).contiguous()), in_tiles(down.transpose(1, 2).contiguous())
        )

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> Packed:
        return pack_quantized(gate_up, down, self.dtype)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: "Plain | Packed") -> Tensor:
        count, ids = len(packed), expert_ids.int()
        if self.is_spread:  # others' experts are one more, outside the range that gets rows
            ids = ids.masked_fill(ids < 0, count).clamp_max_(count)
        given, scales = packed.prepared(x)
        rows, places, counts, scales = torch_npu.npu_moe_init_routing_v2(
            given,
            ids,
            scale=scales,
            expert_num=count + self.is_spread,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, count],
            quant_mode=-1,
            row_idx_type=0,
        )
        out = packed.products(rows, scales, counts, x.dtype)
        # rows behind the last expert's are whatever memory held: choices without a row read the last one, a 0
        if self.is_spread:
            index = torch.arange(len(out), device=x.device)
            out = out.masked_fill((index >= counts.sum()).unsqueeze(1), 0)
            places = places.masked_fill(places < 0, len(out) - 1)
        return torch_npu.npu_moe_finalize_routing(
            out, None, None, None, weights.to(x.dtype), places, None, drop_pad_mode=2
        )


def is_fused(num_experts: int, routing: Routing) -> bool:
    """Whether the gating operator has this way to choose: its documented limits, and sigmoids only with a
    division by their sum."""
    groups = routing.num_groups if routing.num_groups > routing.top_groups else 1
    of_group = num_experts // groups
    tiles = -(-of_group // GROUP_TILE) * GROUP_TILE * groups
    return (
        num_experts <= MOST_EXPERTS
        and of_group > 2
        and tiles <= MOST_EXPERTS
        and (routing.normalizes or routing.score == "softmax")
    )
