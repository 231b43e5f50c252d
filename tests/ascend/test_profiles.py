"""Profiles of a rank on an NPU are torch_npu's: what is asked of it. The simulator has no device to trace."""

from pathlib import Path
from typing import Any

import pytest
import torch_npu

from runtime.messages.ranks import Profile
from tests.devices.drive import start
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


class Recorded:
    """A profile of torch_npu's profiler, and what it was called with."""

    def __init__(self, calls: list[str], **given: Any) -> None:
        self.calls, self.given = calls, given

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")
        self.given["on_trace_ready"]()


def test_a_rank_records_with_the_profiler_of_its_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    given: dict[str, Any] = {}

    def profile(**arguments: Any) -> Recorded:
        given.update(arguments)
        return Recorded(calls, **arguments)

    def handler(folder: str, worker_name: str) -> Any:
        return lambda: calls.append(f"{folder} {worker_name}")

    monkeypatch.setattr(torch_npu.profiler, "profile", profile)
    monkeypatch.setattr(torch_npu.profiler, "tensorboard_trace_handler", handler)
    folder = make_checkpoint("llama", tmp_path / "model")
    executor, _ = start(folder, device="npu", page_size=128, max_total_tokens=1024)
    executor.profile(Profile(folder=str(tmp_path), activities=("GPU",), with_stack=True))
    executor.profile(Profile())
    assert calls == ["start", "stop", f"{tmp_path} rank-0"]
    assert given["activities"] == [torch_npu.profiler.ProfilerActivity.NPU]
    assert given["with_stack"] and not given["record_shapes"]
