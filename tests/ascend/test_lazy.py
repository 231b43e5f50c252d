"""The lazy mode: each wait that a program needs is missed when it is left out, and is enough when it is
there."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch_npu

from tests.ascend.emulate import queue
from tests.ascend.test_simulator import FIA, D, N, Paged, randn

assert torch_npu
pytestmark = pytest.mark.ascend


@pytest.fixture(autouse=True)
def lazy() -> Iterator[None]:
    with queue.lazily():
        yield


def test_work_is_done_when_the_host_waits() -> None:
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    y = x * 3
    torch_device = torch.zeros(4).pin_memory()
    torch_device.copy_(y, non_blocking=True)
    assert torch_device.tolist() == [0, 0, 0, 0]
    torch.npu.current_stream().synchronize()
    assert torch_device.tolist() == [3, 3, 3, 3] and y.tolist() == [3, 3, 3, 3]


def test_pinned_memory_is_read_when_the_copy_runs() -> None:
    source, x = torch.ones(4).pin_memory(), torch.zeros(4, device="npu")
    x.copy_(source, non_blocking=True)
    source.fill_(7)  # too early
    assert x.tolist() == [7, 7, 7, 7]
    done = torch.npu.Event()
    x.copy_(source, non_blocking=True)
    done.record()
    done.synchronize()
    source.fill_(8)
    assert x.tolist() == [7, 7, 7, 7]


def test_a_launch_takes_the_values_of_the_host_with_it() -> None:
    x, amount = torch.zeros(2, device="npu"), torch.tensor(5.0)
    y = x + amount
    amount.fill_(9)
    assert y.tolist() == [5, 5]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_streams_are_ordered_by_events_only(is_ordered: bool) -> None:
    x, side = torch.zeros(4, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()
    x.fill_(1)
    if is_ordered:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x + 1
        side.synchronize()
    assert y.tolist() == ([2, 2, 2, 2] if is_ordered else [1, 1, 1, 1])
    assert x.tolist() == [1, 1, 1, 1]


def test_an_event_is_done_when_what_is_before_it_is() -> None:
    x, event = torch.zeros(4, device="npu"), torch.npu.Event()
    torch.npu.synchronize()
    x.add_(1)
    event.record()
    x.add_(1)
    assert not event.query()
    assert event.query(), "a query moves things on"
    event.synchronize()
    assert x.tolist() == [2, 2, 2, 2]


def test_what_depends_on_values_waits() -> None:
    x = torch.arange(5, device="npu") * 2
    assert (
        x[x > 3].tolist() == [4, 6, 8]
        and int(x.sum()) == 20
        and x.nonzero().flatten().tolist() == [1, 2, 3, 4]
    )


def test_an_error_arrives_where_the_host_waits() -> None:
    cache, slots = (
        torch.zeros(2, 128, 1, 16, device="npu"),
        torch.tensor([999], dtype=torch.int32, device="npu"),
    )
    tokens = torch.ones(1, 1, 16, device="npu")
    torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, cache, cache.clone(), slots, cache_mode="Norm")
    with pytest.raises(RuntimeError, match="aicore execution is abnormal"):
        torch.npu.synchronize()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_updates_of_a_graph_are_ordered_by_its_external_event(is_awaited: bool) -> None:
    paged = Paged()
    q, out, lse = randn(2, N, D), randn(2, N, D), torch.empty(1, device="npu")
    graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        stream, ready = torch.npu.current_stream(), torch.npu.ExternalEvent()
        if is_awaited:
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
    torch.npu.current_stream().synchronize()
    expected = paged.attend(q, [1, 1], [200, 40] if is_awaited else [5, 5])
    assert torch.equal(out.cpu(), expected.cpu())


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_replay_that_is_not_updated_would_hang(is_lazy: bool) -> None:
    queue.library().sim_set_lazy(is_lazy)
    paged, graph = Paged(), torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        paged.attend(randn(2, N, D), [1, 1], [5, 5])
    with pytest.raises(RuntimeError, match="507046|time"):
        graph.replay()
        torch.npu.synchronize()


def test_the_automatic_update_waits_by_itself() -> None:
    paged = Paged()
    q, graph = randn(2, N, D), torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        y = paged.attend(q, [1, 1], [5, 5])
    for lengths in ([300, 130], [7, 9]):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        graph.replay()
        assert torch.equal(y.cpu(), paged.attend(q, [1, 1], lengths).cpu())


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_capture_takes_in_a_stream_that_it_forks(is_joined: bool) -> None:
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    # neighbours: the pool gives each of its streams out again and again
    own, side = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with (
        contextlib.nullcontext() if is_joined else pytest.raises(RuntimeError, match="107027"),
        torch.npu.graph(graph, stream=own),
    ):
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 3
        if is_joined:
            main.wait_stream(side)
        z = y + x
    if is_joined:
        graph.replay()
        assert z.tolist() == [4, 4, 4, 4]


def test_collectives_come_after_what_is_before_them(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                Path(__file__).parent / "hccl_rank.py",
                str(rank),
                "2",
                str(tmp_path / "store"),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "SIM_NPU_LAZY": "1"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]


@pytest.mark.parametrize("is_fenced", [True, False])
def test_an_update_must_not_reach_a_replay_before_it(is_fenced: bool) -> None:
    """Two replays are launched before the host waits: the second's update waits for the end of the first, or
    one of them would hang."""
    paged = Paged()
    q, graph, found = randn(2, N, D), torch.npu.NPUGraph(), []
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        y = paged.attend(q, [1, 1], [5, 5])
    expected = [paged.attend(q, [1, 1], lengths).cpu() for lengths in ([300, 130], [7, 9])]

    def replay(lengths: list[int]) -> None:
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        graph.replay()
        found.append(y.clone())

    replay([300, 130])
    if is_fenced:
        graph.graph_dispatch_mode.update_stream.wait_stream(torch.npu.current_stream())
        replay([7, 9])
        assert [torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True)] == [
            True,
            True,
        ]
        return
    replay([7, 9])
    assert not torch.equal(found[0].cpu(), expected[0])
    with contextlib.suppress(RuntimeError):  # and the device is not what it was
        torch.npu.synchronize()
