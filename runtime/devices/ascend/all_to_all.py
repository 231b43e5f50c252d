"""MoeAllToAll of tokens between experts by CANN's own operators: npu_moe_distribute_dispatch_v2 brings a row for
each choice, sorted by expert, with their numbers on the device; npu_moe_distribute_combine_v2 brings back the
weighted sums. Shapes are fixed, so a step can be captured.

Rows of experts whose activations are int8 travel as int8, by the very rounding that these experts would do
themselves.
"""

import torch
import torch_npu
from torch import Tensor

from runtime.devices.all_to_all import MoeAllToAll
from runtime.devices.ascend.grouped_gemm import Packed
from runtime.devices.ascend.moe import AscendExperts, Plain

# the operators' limits; tokens of a rank, hidden sizes
MOST_TOKENS, MOST_CHOICES, MOST_EXPERTS, SIZES = 512, 16, 1024, range(1024, 8193)
HALVES = (torch.float16, torch.bfloat16)


class Distributed:
    """See above, and MoeAllToAll. What is beyond the operators' limits goes another way."""

    def __init__(self, group: str, rank: int, size: int, experts: AscendExperts, beyond: MoeAllToAll) -> None:
        """`group`: HCCL's name of the ranks."""
        self.where = {"group_ep": group, "ep_world_size": size, "ep_rank_id": rank}
        self.size = size
        self.experts = experts
        self.beyond = beyond

    def apply(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_local: int,
        packed: Plain | Packed,
        is_rounded: bool,
    ) -> Tensor:
        num_experts, choices = num_local * self.size, ids.shape[1]
        if not fits(x, choices, num_experts):
            return self.beyond.apply(x, ids, weights, num_local, packed, is_rounded)
        where = self.where | {"moe_expert_num": num_experts}
        # rows that are no token's go to some experts; the mask that would keep them is not on all devices
        ids = torch.where(ids < 0, torch.arange(choices, device=ids.device), ids).int()
        rows, scales, assist, counts, received, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
            x.contiguous(), ids, quant_mode=2 if is_rounded else 0, expert_token_nums_type=1, **where
        )
        if not is_rounded:
            rows, prepared = packed.prepared(rows)
            scales = scales if prepared is None else prepared
        out = packed.products(rows, scales, counts, x.dtype)
        return torch_npu.npu_moe_distribute_combine_v2(out, ids, assist, received, weights.float(), **where)


def fits(x: Tensor, choices: int, num_experts: int) -> bool:
    """Whether the operators take it: the same on all ranks."""
    return (
        len(x) <= MOST_TOKENS
        and choices <= MOST_CHOICES
        and num_experts <= MOST_EXPERTS
        and x.shape[1] in SIZES
        and x.dtype in HALVES
    )
