"""Experts spread over ranks: npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2, over the
simulated HCCL group of that name.

Limits: op-plugin's documents (517f2e7); for what differs between A2 and A3, and for the buffer
that a step needs, aclnnMoeDistributeDispatchV2 in CANN's operator documents.
What assist_info_for_combine and the counts contain is the library's
own affair: here a row's assist_info begins with the rank, token and choice that it came from.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.experts import garbage
from tests.ascend.emulate.norms import quantised_rows
from tests.ascend.emulate.queue import library
from tests.ascend.emulate.table import (
    need,
    need_dtype,
    need_half,
    need_shape,
    need_strictly,
    need_values,
    operator,
    shapes_only,
)

ASSIST = 128  # int32 of each row


def gather(group: str, mine: Tensor) -> Tensor:
    """(ranks, ...) of equal tensors."""
    size = library().sim_hccl_size(group.encode())
    mine = mine.contiguous()
    found = torch.empty(size, *mine.shape, dtype=mine.dtype)
    call = library().sim_hccl_gather
    call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    code = call(group.encode(), mine.data_ptr(), mine.nbytes, found.data_ptr())
    need(code == 0, f"HCCL group {group!r}: error {code}")
    return found


@dataclass(frozen=True)
class Spread:
    """How experts lie on the ranks of a group."""

    group: str
    size: int
    rank: int
    experts: int
    algorithm: str

    @property
    def is_a2(self) -> bool:
        """Whether the simulated NPU is an Atlas A2."""
        return os.environ.get("SIM_NPU_SOC", "Ascend910B3").startswith("Ascend910B")

    def check_generation(self, tokens: int, hidden: int, choices: int) -> None:
        """Limits of A2 or A3, and the bytes of the group's buffer that they document."""
        given = library().sim_hccl_buffer_mb(self.group.encode()) << 20
        if self.is_a2:
            need(self.algorithm in ("", "fullmesh"), f"comm_alg {self.algorithm!r} is not emulated on A2")
            need(tokens <= 256, f"{tokens} tokens: 1 .. 256 on A2")
            need(hidden <= 7168 and hidden % 32 == 0, f"hidden size {hidden}: 32, 64 .. 7168 on A2")
            need(self.size in (*range(2, 9), 16, 32, 64, 128, 256), f"{self.size} ranks on A2")
            needed = 2 * (tokens * self.size * min(self.local, choices) * hidden * 2 + (2 << 20))
        else:
            need(self.algorithm in ("", "fullmesh_v1", "fullmesh_v2"), f"comm_alg {self.algorithm!r} on A3")
            need(tokens <= 512, f"{tokens} tokens: 1 .. 512 on A3")
            need_strictly(1024 <= hidden <= 8192, f"hidden size {hidden}: 1024 .. 8192 on A3")
            need(self.size <= 768, f"{self.size} ranks on A3")
            sent = -(-(-(-2 * hidden // 32) * 32 + 64) // 512) * 512
            back = -(-2 * hidden // 512) * 512
            needed = 2 * tokens * (self.local * self.size * sent + (choices + 1) * back)
        need(
            shapes_only() or needed <= given, f"the group's buffer of {given} bytes is too small for {needed}"
        )

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.size

    def check(self, x: Tensor, expert_ids: Tensor, global_bs: int, rest: dict[str, Any]) -> None:
        """Documented limits of both operators."""
        odd = [
            name for name, given in rest.items() if given not in (None, 0, "") and name != "shared_expert_num"
        ]
        need(not odd, f"not emulated: {odd}")
        need(0 < len(self.group) < 128, f"group_ep {self.group!r}")
        need(2 <= self.size and 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}")
        need(
            1 <= self.experts <= 1024 and self.experts % self.size == 0,
            f"{self.experts} experts on {self.size} ranks",
        )
        need_dtype("expert_ids", expert_ids, torch.int32)
        need(expert_ids.dim() == x.dim() == 2, "x and expert_ids are 2-D")
        tokens, choices = expert_ids.shape
        need(tokens > 0, "no tokens")
        need(0 < choices <= min(16, self.experts), f"{choices} experts for a token: at most 16")
        self.check_generation(global_bs // self.size or tokens, x.shape[1], choices)
        need(
            global_bs == 0 or global_bs % self.size == 0 and global_bs >= tokens * self.size,
            f"global_bs {global_bs} for {tokens} tokens",
        )
        need_values(
            lambda: ((expert_ids >= 0) & (expert_ids < self.experts)).all(),
            f"an expert outside 0 .. {self.experts - 1}",
        )
        need_values(
            lambda: (expert_ids.sort(-1).values.diff(dim=-1) != 0).all(), "an expert twice in one row"
        )
        real = library().sim_hccl_size(self.group.encode())
        need(
            shapes_only() or real == self.size,
            f"HCCL group {self.group!r} has {real} ranks, ep_world_size is {self.size}",
        )
        others = library().sim_hccl_used(self.group.encode())
        need(not others, f"HCCL group {self.group!r} has {others} other collectives: the operators want none")

    def most_rows(self, tokens: int, choices: int, global_bs: int) -> int:
        """The most rows that a rank can receive."""
        return (global_bs or tokens * self.size) * min(self.local, choices)


def active(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Which (token, choice) takes part."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    need_dtype("x_active_mask", mask, torch.bool)
    if mask.dim() == 2:
        need_shape("x_active_mask", mask, *ids.shape)
        return mask
    need_shape("x_active_mask", mask, ids.shape[0])
    need_values(lambda: (mask[1:] <= mask[:-1]).all(), "x_active_mask: true comes before false")
    return mask[:, None].expand_as(ids)


def padded(x: Tensor, rows: int, fill: int) -> Tensor:
    """x with rows of `fill` behind it."""
    return torch.cat((x, x.new_full((rows - x.shape[0], *x.shape[1:]), fill)))


@operator("npu::npu_moe_distribute_dispatch_v2")
def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    **rest: Any,
) -> tuple[Tensor, ...]:
    """npu_moe_distribute_dispatch_v2."""
    spread = Spread(group_ep, ep_world_size, ep_rank_id, moe_expert_num, comm_alg)
    spread.check(x, expert_ids, global_bs, rest)
    need_half(x=x)
    need(
        quant_mode in (0, 2) and (scales is None or quant_mode == 2),
        "quant_mode is 0, or 2, which may have scales",
    )
    need(expert_token_nums_type in (0, 1), f"expert_token_nums_type {expert_token_nums_type}")
    most = spread.most_rows(*expert_ids.shape, global_bs)
    rows = garbage(most, x.shape[1], dtype=torch.int8 if quant_mode else x.dtype)
    row_scales = garbage(most if quant_mode else 1, dtype=torch.float32)
    assist, counts = (
        garbage(most * ASSIST, dtype=torch.int32),
        torch.zeros(spread.local, ep_world_size, dtype=torch.int32),
    )
    taken = active(x_active_mask, expert_ids)
    if not shapes_only():
        each = (global_bs // ep_world_size) or x.shape[0]
        tokens = gather(group_ep, padded(x, each, 0))
        ids = gather(group_ep, padded(expert_ids.masked_fill(~taken, -1), each, -1))
        at = 0
        for expert in range(spread.local):
            number = spread.rank * spread.local + expert
            for rank in range(ep_world_size):
                for token, choice in (ids[rank] == number).nonzero().tolist():
                    values = tokens[rank, token].float()
                    if quant_mode:
                        values = values if scales is None else values * scales[number]
                        rows[at], row_scales[at] = quantised_rows(values)
                    else:
                        rows[at] = tokens[rank, token]
                    assist[at * ASSIST : at * ASSIST + 3] = torch.tensor(
                        [rank, token, choice], dtype=torch.int32
                    )
                    counts[expert, rank] += 1
                    at += 1
    numbers = counts.sum(-1).long()
    received = counts.flatten().cumsum(0).to(torch.int32)
    return (
        rows,
        row_scales,
        assist,
        numbers if expert_token_nums_type else numbers.cumsum(0),
        received,
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1),
    )


@operator("npu::npu_moe_distribute_combine_v2")
def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    expand_scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    global_bs: int = 0,
    comm_alg: str = "",
    **rest: Any,
) -> Tensor:
    """npu_moe_distribute_combine_v2."""
    spread = Spread(group_ep, ep_world_size, ep_rank_id, moe_expert_num, comm_alg)
    spread.check(expand_x, expert_ids, global_bs, rest)
    need_half(expand_x=expand_x)
    most = spread.most_rows(*expert_ids.shape, global_bs)
    need_dtype("assist_info_for_combine", assist_info_for_combine, torch.int32)
    need_shape("assist_info_for_combine", assist_info_for_combine, most * ASSIST)
    need_shape("expand_x", expand_x, most, None)
    need_dtype("ep_send_counts", ep_send_counts, torch.int32)
    need_shape("ep_send_counts", ep_send_counts, ep_world_size * spread.local)
    need_dtype("expert_scales", expert_scales, torch.float32)
    need_shape("expert_scales", expert_scales, *expert_ids.shape)
    out = torch.zeros(expert_ids.shape[0], expand_x.shape[1])
    if not shapes_only():
        rows, infos = (
            gather(group_ep, expand_x),
            gather(group_ep, assist_info_for_combine.view(most, ASSIST)[:, :3]),
        )
        used = gather(group_ep, ep_send_counts)[:, -1]
        for owner in range(ep_world_size):
            for row, (rank, token, choice) in enumerate(infos[owner, : int(used[owner])].tolist()):
                if rank == ep_rank_id:
                    out[token] += expert_scales[token, choice] * rows[owner, row].float()
    if shared_expert_x is not None:
        need(shared_expert_x.dtype == expand_x.dtype, "shared_expert_x has the dtype of expand_x")
        out = out + shared_expert_x.reshape(out.shape).float()
    return out.to(expand_x.dtype)
