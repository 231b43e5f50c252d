"""Transfers of a device with streams, against a recording one: what waits for what, and that the host waits
for nothing in a launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.ranks.transfers import Streamed


class Recorder:
    """Stands for torch.cuda."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = "main"
        self.is_over = False
        recorder = self

        class Stream:
            def __init__(self, name: str = "down") -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None:
                recorder.calls.append(f"{self.name} waits for {other.name}")

        class Event:
            def record(self, stream: Stream) -> None:
                recorder.calls.append(f"event on {stream.name}")

            def query(self) -> bool:
                return recorder.is_over

            def synchronize(self) -> None:
                recorder.calls.append("the host waits for the event")

        @contextmanager
        def stream(which: Stream) -> Iterator[None]:
            recorder.now = which.name
            yield
            recorder.now = "main"

        self.Stream, self.Event, self.stream = Stream, Event, stream
        self.current_stream = lambda: Stream("main")
        self.current_device = lambda: 3
        self.set_device = lambda number: recorder.calls.append(f"device {number}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found, empty, copy = Recorder(), torch.empty, Tensor.copy_

    def pinned_empty(*shape: Any, pin_memory: bool = False, **rest: Any) -> Tensor:
        assert pin_memory, "what the card copies to must be pinned"
        found.calls.append("pinned")
        return empty(*shape, **rest)

    def record_copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        found.calls.append(f"copy on {found.now}" if non_blocking else "the host waits for a copy")
        return copy(self, source)

    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: found.calls.append("pinned") or self)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda self, stream: found.calls.append(f"kept for {stream.name}")
    )
    monkeypatch.setattr(Tensor, "copy_", record_copy)
    return found


def test_up_is_one_pinned_copy_in_order(recorder: Recorder) -> None:
    target = torch.zeros(3, dtype=torch.int32)
    Streamed(recorder).upload(np.array([1, 2, 3], np.int32), target)
    assert recorder.calls == ["pinned", "copy on main"] and target.tolist() == [1, 2, 3]


def test_down_is_aside_and_waited_for_elsewhere(recorder: Recorder) -> None:
    transfers = Streamed(recorder)
    fetched = transfers.fetch([torch.tensor([1, 2]), torch.tensor([0.5])])
    assert recorder.calls == [
        "down waits for main",
        "pinned",
        "pinned",
        "copy on down",
        "kept for down",
        "copy on down",
        "kept for down",
        "event on down",
    ]
    assert not fetched.is_done()
    recorder.calls.clear()
    recorder.is_over = True
    assert fetched.is_done() and recorder.calls == [], "asking waits for nothing"
    first, second = fetched.arrays()
    assert recorder.calls == ["device 3", "the host waits for the event"] and (
        first.tolist(),
        second.tolist(),
    ) == ([1, 2], [0.5])
