"""The simulator itself: paged attention, captures and both update protocols, refusals, and processes linked
by HCCL."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.ascend.emulate.table import Refused

pytestmark = pytest.mark.ascend
N, K, D, PAGE = 8, 2, 128, 128
FIA = torch_npu.npu_fused_infer_attention_score
KV = {
    "block_size": PAGE,
    "num_heads": N,
    "num_key_value_heads": K,
    "scale": D**-0.5,
    "sparse_mode": 3,
    "input_layout": "TND",
}


class Paged:
    """A cache of 12 pages and two sequences in it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.keys, self.values = (
            torch.randn(12, PAGE, K * D, device="npu", dtype=torch.bfloat16) for _ in range(2)
        )
        self.table = torch.tensor([[3, 5, 0], [1, 0, 2]], dtype=torch.int32, device="npu")
        self.mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)

    def attend(
        self, q: Tensor, q_lengths: list[int], kv_lengths: list[int], op: Any = FIA, **more: Any
    ) -> Tensor:
        ends = torch.tensor(q_lengths).cumsum(0).tolist()
        return op(
            q,
            self.keys,
            self.values,
            atten_mask=self.mask,
            block_table=self.table,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=kv_lengths,
            **KV,
            **more,
        )[0]

    def reference(self, q: Tensor, q_lengths: list[int], kv_lengths: list[int]) -> Tensor:
        found, start = [], 0
        for index, (s, t) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
            pages = self.table[index].cpu().tolist()
            k, v = (
                torch.cat([cache.cpu()[page] for page in pages])[:t]
                .unflatten(-1, (K, D))
                .transpose(0, 1)[None]
                .float()
                for cache in (self.keys, self.values)
            )
            seen = torch.arange(t)[None] <= torch.arange(s)[:, None] + t - s
            rows = q.cpu()[start : start + s].transpose(0, 1)[None].float()
            found.append(
                torch.nn.functional.scaled_dot_product_attention(rows, k, v, attn_mask=seen, enable_gqa=True)[
                    0
                ].transpose(0, 1)
            )
            start += s
        return torch.cat(found)


@pytest.fixture
def paged() -> Paged:
    return Paged()


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="npu", dtype=torch.bfloat16)


def test_attention_over_a_prefix_in_pages(paged: Paged) -> None:
    q = randn(7, N, D)
    found = paged.attend(q, [2, 5], [130, 300]).cpu().float()
    torch.testing.assert_close(found, paged.reference(q, [2, 5], [130, 300]), atol=2e-2, rtol=0)


def test_replays_after_an_automatic_update(paged: Paged) -> None:
    weight, x = randn(N * D, N * D) / 30, randn(2, N * D)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        y = paged.attend((x @ weight).view(2, N, D), [1, 1], [5, 5]) * 2
    assert y.cpu().isnan().all(), "a capture computes nothing"
    for lengths in ([5, 5], [300, 130]):
        x.copy_(torch.randn(2, N * D))
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        graph.replay()
        assert torch.equal(y.cpu(), (paged.attend((x @ weight).view(2, N, D), [1, 1], lengths) * 2).cpu())


def test_replays_after_an_update_by_hand(paged: Paged) -> None:
    q, out, lse = randn(2, N, D), randn(2, N, D), torch.empty(1, device="npu")
    graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        stream, ready = torch.npu.current_stream(), torch.npu.ExternalEvent()
        ready.wait(stream)
        ready.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        paged.attend(q, [1, 1], [5, 5], FIA.out, workspace=None, out=[out, lse])
        handle = torch.npu.graph_task_group_end(stream)
    with torch.npu.stream(side):
        torch.npu.graph_task_update_begin(side, handle)
        paged.attend(q, [1, 1], [200, 40], FIA.out, workspace=None, out=[out, lse])
        torch.npu.graph_task_update_end(side)
        ready.record(side)
    graph.replay()
    assert torch.equal(out.cpu(), paged.attend(q, [1, 1], [200, 40]).cpu())


@pytest.mark.parametrize(
    ("why", "body"),
    [
        ("wait for the device's values", lambda x: x.sum().item()),
        ("wait for the device's values", lambda x: x[x > 0]),
        ("wait for the device's values", lambda x: x.nonzero()),
        ("no NPU kernel", lambda x: x.float().mode()),
        ("reading from the device", lambda x: x.cpu()),
        ("blocking copy", lambda x: x.copy_(torch.ones(4, 4))),
    ],
)
def test_captures_refuse_what_waits_for_the_host(why: str, body: Any) -> None:
    x = randn(4, 4)
    with pytest.raises(Refused, match=why), torch.npu.graph(torch.npu.NPUGraph()):
        body(x)


@pytest.mark.parametrize(
    ("script", "soc"),
    [
        ("hccl_rank.py", "Ascend910B3"),
        ("collectives_rank.py", "Ascend910B3"),
        ("all_to_all_rank.py", "Ascend910B3"),
        ("all_to_all_rank.py", "Ascend910_9391"),
    ],
)
def test_processes_linked_by_hccl(script: str, soc: str, tmp_path: Path) -> None:
    done = [
        subprocess.Popen(
            [sys.executable, "-P", Path(__file__).parent / script, str(rank), "2", str(tmp_path / "store")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "SIM_NPU_SOC": soc},
        )
        for rank in range(2)
    ]
    assert [process.wait(120) for process in done] == [0, 0]
