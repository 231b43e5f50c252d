"""A device with streams, in plain memory: the cpu's arithmetic, and torch's module of a device as far as the
runtime uses it.

What a side stream is given is done at once, or (`is_late`) when it is waited for: the two ends of what a
device may do. So a wait that is missing shows as wrong tokens, as does a buffer that is overwritten too
early.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.partitions import Partitions
from runtime.devices.progress import without_progress
from runtime.messages.ranks import StartRank
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.taped import TapedDevice

EVENT_MS = 2.5  # between any two events


class Stream:
    """Work that is still to be done, in order."""

    def __init__(self, streams: "Streams", name: str = "side") -> None:
        self.streams = streams
        self.name = name
        self.todo: list[Callable[[], Any]] = []

    def wait_stream(self, other: "Stream") -> None:
        self.streams.calls.append(f"{self.name} waits for {other.name}")
        if self.name == "main":
            other.catch_up(len(other.todo))

    def wait_event(self, event: "Event") -> None:
        self.streams.calls.append(f"{self.name} waits for event {event.number}")
        event.synchronize()

    def catch_up(self, count: int) -> None:
        done, self.todo = self.todo[:count], self.todo[count:]
        with torch.inference_mode():
            for work in done:
                work()


class Event:
    """A place in a stream."""

    def __init__(self, streams: "Streams") -> None:
        streams.num_events += 1
        self.number = streams.num_events
        self.streams = streams
        self.is_over = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.streams.now
        self.streams.calls.append(f"event {self.number} on {stream.name}")
        self.stream = stream
        if self.streams.is_late:
            stream.todo.append(self.end)
        else:
            self.end()

    def end(self) -> None:
        self.is_over = True

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, other: "Event") -> float:
        assert self.is_over and other.is_over and other.number > self.number
        return EVENT_MS

    def synchronize(self) -> None:
        while not self.is_over:
            self.stream.catch_up(1)


class Streams:
    """Stands for torch.cuda."""

    def __init__(self, *, is_late: bool) -> None:
        self.is_late = is_late
        self.calls: list[str] = []
        self.num_events = 0
        self.main = self.now = Stream(self, "main")
        self.Stream = lambda: Stream(self)
        self.Event = lambda enable_timing=False: Event(self)

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def stream(self, which: Stream) -> Iterator[None]:
        before, self.now = self.now, which
        yield
        self.now = before

    def current_device(self) -> int:
        return 0

    def set_device(self, number: int) -> None:
        pass


class StreamedRunner(TorchExecutor):
    """A rank on it; with `inner` it has graphs as well."""

    def __init__(
        self,
        streams: Streams,
        inner: TapedDevice | None,
        start: StartRank,
        partitions: Partitions | None = None,
    ) -> None:
        self.inner = inner

        def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Any:
            if inner is not None:
                return replace(inner.open(start, rank, dtype), streams=streams, partitions=partitions)
            ops = CpuOps(dtype)  # in torch: what streams do not see would not wait for them
            device = open_device(start, rank, dtype)
            return replace(
                device,
                streams=streams,
                partitions=partitions,
                ops=ops,
                experts=CpuExperts(ops),
                programs=None,
            )

        facts = FACTS if inner is None else inner.facts
        super().__init__(start_torch_rank(0, start, without_progress, opened, facts))


def install(patch: pytest.MonkeyPatch, streams: Streams) -> None:
    """Page-locked memory is plain memory here, and copies of a side stream are its work."""
    empty, copy = torch.empty, Tensor.copy_

    def plain_empty(*shape: Any, pin_memory: bool = False, **rest: Any) -> Tensor:
        return empty(*shape, **rest)

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if streams.now.name == "main" or not non_blocking:
            return copy(self, source)
        streams.calls.append(f"copy on {streams.now.name}")
        if not streams.is_late:
            return copy(self, source)
        streams.now.todo.append(lambda: copy(self, source))
        return self

    patch.setattr(torch, "empty", plain_empty)
    patch.setattr(Tensor, "pin_memory", lambda self: self)
    patch.setattr(Tensor, "record_stream", lambda self, stream: None)
    patch.setattr(Tensor, "copy_", copied)
