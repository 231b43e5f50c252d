"""Memory of an NPU that is given back and taken again, on the simulator: tokens, graphs and bytes."""

from pathlib import Path

import pytest

from runtime.messages.memory import ChangeMemory, Part, UpdateWeights
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

pytestmark = pytest.mark.ascend


def test_weights_pages_and_graphs_go_and_come_back(tmp_path: Path) -> None:
    executor, ready = start(
        make_checkpoint("qwen3", tmp_path),
        device="npu",
        dtype="bfloat16",
        page_size=128,
        max_total_tokens=1024,
        graph_sizes=[1],
    )

    def tokens() -> list[int]:
        planner = Planner(executor, ready, 128)
        return planner.generate(planner.row(0, [5, 9, 100, 7], sampling()), 6)

    expected = tokens()
    assert executor.capture(1).error == "" and tokens() == expected
    states: list[tuple[Part, ...]] = [("kv_cache", "weights"), ("weights",), ()]
    for released in states:
        report = executor.change_memory(ChangeMemory(1, released))
        assert report.released == released and report.error == ""
        assert (report.weights_bytes > 0, report.pages_bytes > 0) == (
            "weights" not in released,
            "kv_cache" not in released,
        )
    assert tokens() == expected
    assert executor.capture(1).error == "" and tokens() == expected
    for is_trial in (True, False):
        assert executor.update_weights(UpdateWeights(2, str(tmp_path), "auto", is_trial)).error == ""
    assert tokens() == expected
