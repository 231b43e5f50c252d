"""One of the processes of test_simulator.py: `collectives_rank.py RANK SIZE STORE_FILE`. Each token goes to
the ranks of its experts, whose "expert" multiplies by its number plus one, and comes back."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_npu

from tests.ascend.emulate.table import Refused

EXPERTS, HIDDEN = 8, 64


def experts(rows: torch.Tensor, counts: torch.Tensor, first: int) -> torch.Tensor:
    """Multiplies rows by the number of their expert plus one."""
    factors = torch.arange(first, first + len(counts), device="npu") + 1
    kept = int(counts.sum())
    rows[:kept] *= factors.repeat_interleave(counts).to(rows.dtype)[:, None]
    return rows


def main(rank: int, size: int, store: str) -> None:
    """Runs one rank."""
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.barrier()
    own = dist.new_group()  # the operators want a group in which nothing else is exchanged
    backend: Any = own._get_backend(torch.device("npu"))  # type: ignore[union-attr]
    group = backend.get_hccl_comm_name(rank)
    where = {"group_ep": group, "ep_world_size": size, "ep_rank_id": rank, "moe_expert_num": EXPERTS}
    torch.manual_seed(rank)
    x = torch.randn(3, HIDDEN).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(3)]).to(torch.int32)
    shares = torch.rand(3, 2)
    expected = x.float() * (shares * (ids + 1)).sum(-1, keepdim=True)

    def moe(**more: object) -> torch.Tensor:
        rows, _, assist, counts, received, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
            x.npu(), ids.npu(), **where, **more
        )
        assert rows.shape == (3 * size * 2, HIDDEN) and counts.shape == (EXPERTS // size,)
        rows = experts(rows, counts, rank * EXPERTS // size)
        return torch_npu.npu_moe_distribute_combine_v2(
            rows, ids.npu(), assist, received, shares.npu(), **where, **more
        )

    torch.testing.assert_close(moe().cpu().float(), expected, atol=0.2, rtol=0.02)
    torch.testing.assert_close(moe(global_bs=3 * size).cpu().float(), expected, atol=0.2, rtol=0.02)
    mask = torch.tensor([True, True, False])
    found = moe(x_active_mask=mask.npu()).cpu().float()
    torch.testing.assert_close(found, expected * mask[:, None], atol=0.2, rtol=0.02)
    rows, scales, *_, counts, _, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
        x.npu(), ids.npu(), **where, quant_mode=2
    )
    assert rows.dtype == torch.int8 and scales.shape == rows.shape[:1] and counts.dtype == torch.int64
    wrong = {
        "true comes before": {"x_active_mask": torch.tensor([True, False, True]).npu()},
        "global_bs": {"global_bs": 2},
        "quant_mode": {"quant_mode": 1},
        "expert_token_nums_type": {"expert_token_nums_type": 2},
    }
    for why, more in wrong.items():
        with pytest.raises(Refused, match=why):
            torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **where, **more)
    for why, bad in {"twice": torch.zeros_like(ids), "outside": ids + EXPERTS}.items():
        with pytest.raises(Refused, match=why):
            torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), bad.npu(), **where)
    with pytest.raises(Refused, match="ep_world_size"):
        torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **where | {"ep_world_size": 2 * size})
    with pytest.raises(Refused, match="7 experts"):
        torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), (ids % 7).npu(), **where | {"moe_expert_num": 7})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
