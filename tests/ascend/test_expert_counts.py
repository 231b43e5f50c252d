"""Expert load on an NPU, steps launched one by one and captured ones: the counts of the cpu."""

from pathlib import Path

import pytest

from runtime.messages.ranks import CountExperts
from tests.ascend.test_exact import MODELS
from tests.ascend.test_graphs import PAGE
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


def test_counts_are_those_of_the_cpu(tmp_path: Path) -> None:
    family, overrides = MODELS["qwen3, experts"]
    folder = make_checkpoint(family, tmp_path, **overrides)
    found = []
    for device, sizes in (("cpu", []), ("npu", [4])):
        executor, ready = start(
            folder,
            device=device,
            page_size=PAGE,
            dtype="float32",
            max_len=512,
            max_total_tokens=2048,
            graph_sizes=sizes,
            expert_steps=8,
        )
        for size in sizes:
            assert executor.capture(size).error == ""
        planner = Planner(executor, ready, PAGE)
        executor.count_experts(CountExperts(1, "start"))
        rows = [planner.row(slot, [7 * slot + i for i in range(5)], sampling()) for slot in range(3)]
        planner.run([], [(row, 5) for row in rows])
        for _ in range(4):
            planner.run(rows, [])
        report = executor.count_experts(CountExperts(2, "read")).result()
        assert report is not None and report.num_steps == 5  # type: ignore[union-attr]
        found.append(report.counts.tolist())  # type: ignore[union-attr]
    assert found[0] == found[1] and sum(found[0])
