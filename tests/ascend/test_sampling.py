"""Random tokens on an NPU: in captured steps the same as outside, whatever the company, and the CPU's where
its order is the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.ascend.test_exact import PAGE, SHORT
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

COUNT = 6
PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "min_p": 0.05, "seed": -(2**63)},
]
CUT: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.8, "seed": 2**63 - 1},
    {"temperature": 1.5, "top_k": 5, "seed": 9},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.9, "min_p": 0.01, "seed": 4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def tokens(
    folder: Path, requests: list[dict[str, Any]], sizes: list[int], **options: Any
) -> tuple[list[list[int]], list[Any], Any]:
    """Of rows that all decode together; the graphs that were replayed; and all that were captured."""
    base = {
        "device": "npu",
        "page_size": PAGE,
        "dtype": "float32",
        "max_len": 512,
        "max_total_tokens": 2048,
        "graph_sizes": sizes,
    }
    executor, ready = start(folder, **(base | options))
    for size in sizes:
        assert executor.capture(size).error == ""
    rank: Any = executor
    graphs, replayed = rank.runner.device.graphs, []
    if graphs is not None:
        replay = graphs.replay
        graphs.replay = lambda graph, lengths: [replayed.append(graph), replay(graph, lengths)].clear()
    planner = Planner(executor, ready, options.get("page_size", PAGE))
    rows = [planner.row(slot, SHORT, sampling(**request)) for slot, request in enumerate(requests)]
    planner.run([], [(row, len(SHORT)) for row in rows])
    for _ in range(COUNT):
        planner.run(rows, [])
    return [row.tokens[len(SHORT) :] for row in rows], replayed, rank.runner.graphs


@pytest.mark.parametrize("backend", ["ascend", "pytorch"])
@pytest.mark.parametrize(
    ("requests", "draw"),
    [(PLAIN, (0, False)), ([*PLAIN, *CUT], (1024, True))],
    ids=["nothing is cut", "some are cut"],
)
def test_captured_draws_are_those_outside_and_the_cpus(
    requests: list[dict[str, Any]], draw: tuple[int, bool], backend: str, folder: Path
) -> None:
    """Greedy rows among them; all rows are padded to eight."""
    found, replayed, graphs = tokens(folder, requests, [8], device_options={"sampling_backend": backend})
    recorded = graphs.recorded[8]
    assert replayed == [recorded.forward, recorded.samplers[draw]] * COUNT
    outside, replayed, _ = tokens(folder, requests, [], device_options={"sampling_backend": backend})
    assert found == outside and not replayed
    on_cpu, _, _ = tokens(folder, requests, [], device="cpu", page_size=16)
    # the fused filter keeps the order of the vocabulary
    alike = len(requests) if backend == "pytorch" else len(PLAIN)
    assert found[:alike] == on_cpu[:alike]
