"""Pages to host memory and back: the bytes, the order of the streams, and what is refused."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.cuda import page_copies as copies
from runtime.devices.cuda.page_copies import CudaPageCopier
from runtime.devices.host_memory import LAYOUTS, HostPages
from runtime.errors import StartError
from runtime.messages.steps import Admit, StepPlan
from runtime.ranks.step_copies import written_pages
from tests.devices.cuda.torch_device import HAS_GPU
from tests.devices.drive import sampling

PAGE = 4


class Streams:
    """torch.cuda's streams, as a list of what was asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.main, self.side = Stream("main", self.calls), Stream("side", self.calls)
        self.now = self.main

    def Stream(self) -> "Stream":
        return self.side

    def current_stream(self) -> "Stream":
        return self.now

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        assert device == 0

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        self.now = stream
        yield
        self.now = self.main


class Stream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.events = name, calls, 0

    def wait_stream(self, other: "Stream") -> None:
        self.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "Event") -> None:
        self.calls.append(f"{self.name} waits for event {event.number}")

    def record_event(self) -> "Event":
        self.events += 1
        return Event(self.events)

    def synchronize(self) -> None:
        self.calls.append("the host waits")


@dataclass
class Event:
    number: int
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(copies, "unlock", lambda host: None)
    fds = []

    def make(
        layout: str, dim: int = 16, *, joined: bool = False
    ) -> tuple[CudaPageCopier, Streams, HostPages, list[tuple[torch.Tensor, ...]]]:
        kv: list[tuple[torch.Tensor, ...]] = [
            (torch.randn(6 * PAGE, 2, dim), torch.randn(6 * PAGE, 2, dim // 2).bfloat16()) for _ in range(2)
        ]
        if joined:  # latents and rotary parts as one row for each token
            sizes = (dim, dim // 2)
            kv = [torch.randn(6 * PAGE, 1, sum(sizes)).split(sizes, 2) for _ in range(2)]
        parts = tuple(cache[:PAGE].nbytes for pair in kv for cache in pair)
        fds.append(os.memfd_create("copies-test"))
        os.ftruncate(fds[-1], 5 * sum(parts))
        streams, host = Streams(), HostPages(fds[-1], 5, parts, layout)
        return CudaPageCopier(kv, host, PAGE, streams), streams, host, kv

    yield make
    for fd in fds:
        os.close(fd)


def index(*places: int) -> np.ndarray:
    return np.array(places, np.int32)


@pytest.mark.skipif(HAS_GPU, reason="pages of the cpu; with a GPU, tests/cuda/test_rank.py copies")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dim", [16, 6], ids=["words", "bytes"])
def test_pages_come_back_as_they_were(layout: str, dim: int, joined: bool, opened: Any) -> None:
    made, streams, host, kv = opened(layout, dim, joined=joined)
    before = [[cache.clone().view(6, PAGE, -1) for cache in pair] for pair in kv]
    made.save(index(5, 2), index(0, 4))
    made.overwrite(index(1, 3))
    made.overwrite(index(1, 2))
    for part, cache in enumerate(cache for pair in before for cache in pair):
        assert host.part(part)[4].tobytes() == cache[2].contiguous().view(torch.uint8).numpy().tobytes()
    for pair in kv:
        for cache in pair:
            cache.zero_()
    arriving = made.load(index(4, 0, 4), index(1, 5, 0))
    arriving.wait(1)
    assert made.finish(is_alone=False) is None
    for pair, old in zip(kv, before, strict=True):
        for cache, was in zip(pair, old, strict=True):
            now = cache.view(6, PAGE, -1)
            assert torch.equal(now[[0, 1, 5]], was[[2, 2, 5]]) and not now[[2, 3, 4]].any()
    made.close()
    assert streams.calls == [
        "side waits for main",
        "main waits for event 1",
        "side waits for main",
        "main waits for event 3",
        "main waits for side",
        "the host waits",
    ]


@pytest.mark.skipif(HAS_GPU, reason="pages of the cpu")
def test_steps_wait_for_saves_of_the_pages_that_they_write_to(opened: Any) -> None:
    made, streams, *_ = opened("layer_first")
    made.save(index(5, 2), index(0, 4))
    made.save(index(1, 3), index(1, 2))
    streams.calls.clear()
    made.overwrite(index(0, 4))
    assert made.finish(is_alone=True) is streams.side, (
        "the result follows the copies, the main stream does not"
    )
    assert streams.calls == []
    made.overwrite(index(5))
    made.overwrite(index(2, 3))
    assert streams.calls == ["main waits for event 1", "main waits for event 2"]
    for saving in made._saving:
        saving.done.is_done = True
    made.overwrite(index(5, 2, 1, 3))
    assert len(streams.calls) == 2 and made._saving == []


@pytest.mark.skipif(HAS_GPU, reason="pages of the cpu; with a GPU, tests/cuda/test_rank.py copies")
def test_layers_are_saved_while_later_ones_are_computed(opened: Any) -> None:
    """A thread says that a layer is there behind the event of its copies."""
    made, streams, host, kv = opened("page_first")
    reported: list[bool] = []
    saved, pages, hosts = made._saving, index(5, 2), index(0, 4)
    made.save_layers(range(1), pages, hosts, lambda: reported.append(saved[0].done.is_done))
    kept = kv[1][0].clone()
    kv[1][0].mul_(2)  # as a later layer of the step
    made.save_layers(range(1, 2), pages, hosts, None)
    assert made.finish(is_alone=True) is streams.side
    made.close()
    assert reported == [True]
    own = [cache.view(6, -1)[2].view(torch.uint8).numpy().tobytes() for pair in kv for cache in pair]
    assert [host.part(part)[4].tobytes() for part in range(4)] == own and not torch.equal(kept, kv[1][0])
    assert streams.calls == ["side waits for main", "side waits for main", "the host waits"]


def test_pages_that_a_step_writes_to() -> None:
    """Not the pages of a prefix that a new sequence shares, of which one may be saved by the same plan."""
    plan = plan_of(slots=[0, 0, 0, 1], rows=[0, 1, 2, 7], pages=[10, 11, 12, 13], lengths={0: 2 * PAGE - 1})
    assert written_pages(plan, PAGE).tolist() == [11, 12, 13]
    plan = plan_of(slots=[0, 0], rows=[0, 1], pages=[10, 11], lengths={0: 2 * PAGE})
    assert written_pages(plan, PAGE).tolist() == []
    plan = plan_of(slots=[3], rows=[0], pages=[9], lengths={})
    assert written_pages(plan, PAGE).tolist() == [9]


def plan_of(slots: list[int], rows: list[int], pages: list[int], lengths: dict[int, int]) -> StepPlan:
    ints = {
        name: np.array(values, np.int32)
        for name, values in (("slots", slots), ("rows", rows), ("ids", pages))
    }
    empty = np.empty(0, np.int32)
    return StepPlan(
        step=0,
        num_decodes=0,
        admits=[
            Admit(slot, sampling(), length + 1, empty, length=length) for slot, length in lengths.items()
        ],
        slots=empty,
        counts=empty,
        samples=np.empty(0, np.uint8),
        token_ids=empty,
        page_slots=ints["slots"],
        page_rows=ints["rows"],
        page_ids=ints["ids"],
    )


def test_places_that_are_none(opened: Any) -> None:
    made, *_ = opened("layer_first")
    for pages, hosts in (((6,), (0,)), ((0,), (5,)), ((-1,), (0,))):
        with pytest.raises(IndexError):
            made.save(index(*pages), index(*hosts))


def test_memory_that_cannot_be_locked(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, host, _ = opened("layer_first")
    asked = []

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            asked.append((address, size, flags))
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    with pytest.raises(StartError, match="cannot be page-locked .CUDA error 2.*--hicache-size"):
        copies.lock(host)
    assert asked == [(host.address, 5 * host.page_bytes, 0)] and host.part(0).ctypes.data == host.address
