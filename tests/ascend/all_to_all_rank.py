"""One of the processes of test_simulator.py: `all_to_all_rank.py RANK SIZE STORE_FILE`. Experts spread over
ranks give what one rank with all of them gives, by each way of exchange; so do they when the step is
captured."""

import sys

import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor

from runtime.devices.ascend.all_to_all import DispatchCombine
from runtime.devices.ascend.collectives import HcclCollectives, group_name
from runtime.devices.ascend.moe import AscendExperts
from runtime.devices.ascend.soc import ExpertLayout, Soc, soc_named
from runtime.devices.base import Quantized
from runtime.devices.torch_all_to_all import LowLatencyAllToAll, NormalAllToAll
from runtime.models.config.quantization_schemes import Int8
from tests.ascend.emulate.table import Refused

assert torch_npu  # brings the backend
BUFFER_MB = 150  # of the exchange's group; HCCL_BUFFSIZE, of the others, is 200
EXPERTS, HIDDEN, INNER, TOKENS, CHOICES = 8, 1024, 64, 3, 2


def quantised(weight: Tensor) -> Quantized:
    """int8 weights with a scale for each output."""
    scale = weight.abs().amax(2, keepdim=True) / 127
    return Quantized(Int8("token"), (weight / scale).round().to(torch.int8), scale)


def refusals(rank: int, size: int, group: str, shared_group: str, soc: Soc) -> None:
    """What the operators refuse: a group with other collectives, and more tokens than the buffer holds."""
    layout = ExpertLayout(hidden=7168, top_k=8, num_experts=128 * size, num_ranks=size)
    most = soc.dispatched(layout, BUFFER_MB)
    assert 0 < most <= soc.max_tokens
    too_many = "buffer of" if most < soc.max_tokens else "tokens: 1 .. "
    for tokens, name, reason in (
        (most, group, ""),
        (most + 1, group, too_many),
        (most, shared_group, "other collectives"),
    ):
        x = torch.zeros(tokens, layout.hidden, dtype=torch.bfloat16, device="npu")
        ids = torch.arange(8, dtype=torch.int32, device="npu").expand(tokens, 8).contiguous()
        try:
            torch_npu.npu_moe_distribute_dispatch_v2(
                x,
                ids,
                group_ep=name,
                ep_world_size=size,
                ep_rank_id=rank,
                moe_expert_num=layout.num_experts,
                comm_alg=soc.algorithm,
            )
            torch.npu.synchronize()
        except Refused as refusal:
            assert reason and reason in str(refusal), refusal
        else:
            assert not reason, reason


def main(rank: int, size: int, store: str) -> None:
    """Runs one rank."""
    torch.npu.set_device(rank)
    torch_device = torch.device("npu", rank)
    torch.npu.config.allow_internal_format = True
    ranks = HcclCollectives(rank, size, store, torch_device)
    experts = AscendExperts(torch.bfloat16, num_groups=size)
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 32, torch.randn(EXPERTS, HIDDEN, INNER) / 8
    xs = torch.randn(size, TOKENS, HIDDEN).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(size * TOKENS)]).view(
        size, TOKENS, CHOICES
    )
    weights = torch.rand(size, TOKENS, CHOICES)
    ids[-1, -1] = -1  # no token
    local = EXPERTS // size
    own = slice(rank * local, (rank + 1) * local)
    x, chosen, shares = xs[rank].npu(), ids[rank].npu(), weights[rank].npu()
    real = slice(0, TOKENS - (rank == size - 1))
    ways = [NormalAllToAll(ranks, experts), LowLatencyAllToAll(ranks, experts)]
    fallback = LowLatencyAllToAll(ranks, None)  # type: ignore[arg-type]
    soc = soc_named(torch.npu.get_device_name())
    assert soc is not None
    group = group_name(rank, ranks.own_group(BUFFER_MB))
    ways.append(DispatchCombine(group, rank, size, experts, fallback, soc, BUFFER_MB))
    for is_rounded, packed, whole in (
        (
            False,
            experts.pack(gate_up[own].bfloat16().npu(), down[own].bfloat16().npu()),
            experts.pack(gate_up.bfloat16().npu(), down.bfloat16().npu()),
        ),
        (
            True,
            experts.pack_quantized(quantised(gate_up[own].npu()), quantised(down[own].npu())),
            experts.pack_quantized(quantised(gate_up.npu()), quantised(down.npu())),
        ),
    ):
        expected = experts.apply(x, chosen, shares, whole).cpu().float()[real]
        assert expected.std() > 0.1
        for way in ways:
            found = way.apply(x, chosen.clone(), shares, local, packed, is_rounded).cpu().float()[real]
            torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
        for way in ways[1:]:
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                out = way.apply(x, chosen, shares, local, packed, is_rounded)
            graph.replay()
            torch.testing.assert_close(out.cpu().float()[real], expected, atol=0.03, rtol=0.03)
    refusals(rank, size, group, group_name(rank, dist.group.WORLD), soc)
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
