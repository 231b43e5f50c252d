"""Limits of CANN's public tiling code: every operator of the list has a table of them (calls_tiling.py, which
test_refusals.py calls), and those that exchange experts have theirs here, for A2 and for A3."""

import pytest
import torch
import torch_npu

from runtime.devices.ascend.soc import SOCS, ExpertLayout
from tests.ascend.calls_tiling import DISPATCH, TILING
from tests.ascend.emulate.operators import OPERATORS
from tests.ascend.emulate.table import Limits, Refused, only_shapes

assert torch_npu  # brings the operators
pytestmark = pytest.mark.ascend

# what steps spend their time in: parts of the tiling files' names
TILED = (
    "fused_infer_attention_score",
    "prompt_flash_attention",
    "incre_flash_attention",
    "mla_prolog",
    "moe_distribute_dispatch_v2",
    "grouped_matmul",
    "quant_batch_matmul_v3",
    "kv_rms_norm_rope_cache",
    "scatter_pa_kv_cache",
)
EXCHANGES = ("npu::npu_moe_distribute_dispatch_v2", "npu::npu_moe_distribute_combine_v2")
NAMES = {"a2": "Ascend910B3", "a3": "Ascend910_9391"}


@pytest.mark.parametrize("part", TILED)
def test_each_operator_has_the_limits_of_its_tiling(part: str) -> None:
    files = [source.rpartition("/")[2] for source in (*(case.source for case in TILING), DISPATCH)]
    assert any(part in name for name in files)
    assert all(case.source and case.wrong for case in TILING)


def exchange(name: str, layout: ExpertLayout, tokens: int, algorithm: str, **more: object) -> None:
    """A call with shapes alone, as rank 0 of a group that is not there."""
    rows = tokens * layout.num_ranks * min(layout.num_local, layout.top_k)
    ids = torch.zeros(tokens, layout.top_k, dtype=torch.int32)
    named: dict[str, object] = {
        "group_ep": "group",
        "ep_world_size": layout.num_ranks,
        "ep_rank_id": 0,
        "moe_expert_num": layout.num_experts,
        "comm_alg": algorithm,
    }
    given: tuple[torch.Tensor, ...] = (torch.empty(tokens, layout.hidden, dtype=torch.bfloat16), ids)
    if "combine" in name:
        given = (
            torch.empty(rows, layout.hidden, dtype=torch.bfloat16),
            ids,
            torch.empty(rows * 128, dtype=torch.int32),
            torch.empty(layout.num_experts, dtype=torch.int32),
            torch.empty(tokens, layout.top_k),
        )
    with only_shapes():
        OPERATORS[name](*given, **named | more)


R1 = ExpertLayout(hidden=7168, top_k=8, num_experts=256, num_ranks=16)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(
    ("soc", "layout", "tokens", "reason"),
    [
        ("a2", R1, 256, ""),
        ("a2", R1, 257, "tokens: 1 .. 256 on A2"),
        ("a2", ExpertLayout(hidden=7200, top_k=8, num_experts=256, num_ranks=16), 1, "hidden size 7200"),
        ("a2", ExpertLayout(hidden=7150, top_k=8, num_experts=256, num_ranks=16), 1, "hidden size 7150"),
        ("a2", ExpertLayout(hidden=7168, top_k=8, num_experts=240, num_ranks=24), 1, "24 ranks on A2"),
        ("a3", R1, 512, ""),
        ("a3", R1, 513, "tokens: 1 .. 512 on A3"),
        ("a3", ExpertLayout(hidden=992, top_k=8, num_experts=256, num_ranks=16), 1, "hidden size 992"),
        ("a3", ExpertLayout(hidden=8224, top_k=8, num_experts=256, num_ranks=16), 1, "hidden size 8224"),
        ("a3", ExpertLayout(hidden=7168, top_k=8, num_experts=1540, num_ranks=770), 1, "1540 experts"),
        ("a3", ExpertLayout(hidden=7168, top_k=8, num_experts=770, num_ranks=770), 1, "770 ranks on A3"),
        (
            "a3",
            ExpertLayout(hidden=7168, top_k=17, num_experts=256, num_ranks=16),
            1,
            "17 experts for a token",
        ),
    ],
)
def test_limits_of_the_exchange(
    name: str, soc: str, layout: ExpertLayout, tokens: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator refuses what the runtime's own table of the generation refuses, and takes the rest."""
    monkeypatch.setattr(Limits, "strict", True)
    monkeypatch.setenv("SIM_NPU_SOC", NAMES[soc])
    ours = SOCS[soc]
    assert (ours.takes(layout) and tokens <= ours.max_tokens) == (not reason)
    if not reason:
        return exchange(name, layout, tokens, ours.algorithm)
    with pytest.raises(Refused, match=reason):
        exchange(name, layout, tokens, ours.algorithm)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"ep_rank_id": 16}, "rank 16 of 16"),
        ({"moe_expert_num": 250}, "250 experts on 16 ranks"),
        ({"group_ep": "x" * 128}, "group_ep"),
        ({"group_ep": ""}, "group_ep"),
        ({"global_bs": 40}, "global_bs 40"),
        ({"global_bs": 16}, "global_bs 16 for 4 tokens"),
        ({"zero_expert_num": 1}, "not emulated"),
        ({"comm_alg": "ccu"}, "comm_alg"),
    ],
)
def test_attributes_of_the_exchange(
    name: str, more: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_NPU_SOC", NAMES["a3"])
    with pytest.raises(Refused, match=reason):
        exchange(name, R1, 4, "", **more)
