"""All-to-all of MoE tokens by CANN's fused operators: npu_moe_distribute_dispatch_v2 sends a row to the rank
of each of a token's experts, sorted by expert, with the counts on the device; npu_moe_distribute_combine_v2
brings back the weighted sums. Shapes are fixed, so a step can be captured.

Rows for experts whose activations are int8 are sent as int8, quantized just as these experts would do it.
Both operators want an HCCL group in which nothing else is exchanged.
"""

import torch
import torch_npu
from torch import Tensor

from runtime.devices.all_to_all import MoeAllToAll
from runtime.devices.ascend.grouped_gemm import QuantizedExperts
from runtime.devices.ascend.moe import AscendExperts, DenseExperts
from runtime.devices.ascend.soc import ExpertLayout, Soc

HALVES = (torch.float16, torch.bfloat16)


class DispatchCombine:
    """A MoeAllToAll (devices/all_to_all.py). Steps beyond the operators' limits use `fallback`."""

    def __init__(
        self,
        group: str,
        rank: int,
        size: int,
        experts: AscendExperts,
        fallback: MoeAllToAll,
        soc: Soc,
        buffer_mb: int,
    ) -> None:
        """`group`: HCCL's name of a group of the ranks that nothing else uses, whose buffer has `buffer_mb`
        megabytes."""
        self.group_args = {
            "group_ep": group,
            "ep_world_size": size,
            "ep_rank_id": rank,
            "comm_alg": soc.algorithm,
        }
        self.size = size
        self.experts = experts
        self.fallback = fallback
        self.soc = soc
        self.buffer_mb = buffer_mb

    def apply(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_local: int,
        packed: DenseExperts | QuantizedExperts,
        quantizes: bool,
    ) -> Tensor:
        """Weighted sums of this rank's tokens, x [P, hidden]; see MoeAllToAll.apply."""
        top_k = ids.shape[1]
        layout = ExpertLayout(
            hidden=x.shape[1], top_k=top_k, num_experts=num_local * self.size, num_ranks=self.size
        )
        # the same on all ranks, for so are all of these
        if x.dtype not in HALVES or len(x) > self.soc.dispatched(layout, self.buffer_mb):
            return self.fallback.apply(x, ids, weights, num_local, packed, quantizes)
        group_args = self.group_args | {"moe_expert_num": layout.num_experts}
        # padding rows go to some experts: not all devices have the mask that would drop them
        ids = torch.where(ids < 0, torch.arange(top_k, device=ids.device), ids).int()
        rows, scales, assist_info, counts, num_received, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
            x.contiguous(), ids, quant_mode=2 if quantizes else 0, expert_token_nums_type=1, **group_args
        )
        if not quantizes:
            rows, own_scales = packed.quantize(rows)
            scales = scales if own_scales is None else own_scales
        out = packed.forward(rows, scales, counts, x.dtype)
        return torch_npu.npu_moe_distribute_combine_v2(
            out, ids, assist_info, num_received, weights.float(), **group_args
        )
