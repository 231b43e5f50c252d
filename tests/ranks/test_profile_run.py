"""What a step takes is measured before pages are counted, and a step that does not fit is launched again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.program import Program
from runtime.devices.progress import without_progress
from runtime.errors import StartError
from runtime.messages.ranks import StartRank
from runtime.ranks.profile_run import largest_step, step_pages
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.drive import Planner, sampling, start, start_rank
from tests.models.make import make_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.mark.parametrize(
    ("max_step_tokens", "max_slots", "max_len", "counts"),
    [(20, 4, 100, [1, 1, 1, 17]), (20, 4, 8, [1, 3, 8, 8]), (3, 4, 100, [1, 1, 1]), (32, 4, 8, [8, 8, 8, 8])],
)
def test_the_largest_step(max_step_tokens: int, max_slots: int, max_len: int, counts: list[int]) -> None:
    plan = largest_step(start_rank("", max_step_tokens=max_step_tokens, max_slots=max_slots, max_len=max_len))
    assert plan.counts.tolist() == counts and plan.samples.all() and len(plan.token_ids) == sum(counts)


@pytest.mark.parametrize(
    ("max_len", "page_size", "pages"), [(1000, 128, 33), (4096, 128, 32), (100, 1, 1600), (1000, 4096, 5)]
)
def test_pages_of_the_largest_step(max_len: int, page_size: int, pages: int) -> None:
    """4096 tokens in 16 rows: of 1000 tokens four rows with 8 pages, and one with what is left."""
    plan = largest_step(start_rank("", max_step_tokens=4096, max_slots=16, max_len=max_len))
    assert step_pages(plan, page_size) == pages


class Measured:
    """The cpu's memory, with numbers of its own."""

    def __init__(self, own: Any, free: int, peak: int) -> None:
        self.own, self.free, self.taken, self.ran = own, free, peak, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def free_bytes(self) -> int:
        return self.free

    def measure_peak(self, run: Any) -> int:
        run()
        self.ran += 1
        return self.taken


def started(free: int, peak: int, message: StartRank) -> tuple[TorchExecutor, list[Measured]]:
    opened: list[Measured] = []

    def open_measured(start: Any, rank: int, dtype: torch.dtype) -> Any:
        device = open_device(start, rank, dtype)
        opened.append(Measured(device.memory, free, peak))
        return replace(device, memory=opened[0])

    return TorchExecutor(start_torch_rank(0, message, without_progress, open_measured, FACTS)), opened


@pytest.mark.parametrize(
    ("fraction", "peak", "part"),
    [(1.0, 3 * MIB, 1.0), (1.0, 2 * MIB, 2.0), (0.5, MIB, 2.0), (0.5, 3 * MIB, 1.0)],
)
def test_pages_leave_room_for_the_largest_step(fraction: float, peak: int, part: float, folder: Path) -> None:
    """Of 4 MiB; `part`: MiB for weights that take nothing of them here, and pages."""
    message = start_rank(folder, memory_fraction=fraction, max_slots=64, max_step_tokens=80)
    executor, opened = started(4 * MIB, peak, message)
    ready = executor.ready
    assert opened[0].ran == 1
    other_bytes = 0 if fraction == 1.0 or peak == 3 * MIB else ready.weights_bytes
    page_bytes = ready.pages_bytes // ready.num_pages
    assert ready.num_pages == (int(part * MIB) - other_bytes) // page_bytes
    planner = Planner(executor, ready, 4)
    assert len(planner.generate(planner.row(0, [5, 6, 7], sampling()), 4)) == 4


def test_a_step_that_cannot_fit_is_reported_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *rest: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(CpuOps, "linear", fail)
    monkeypatch.setattr(Program, "run", fail)
    with pytest.raises(
        StartError, match="a step of 512 tokens and 8 sequences does not fit .* --chunked-prefill-size"
    ):
        started(4 * MIB, 0, start_rank(folder))


@pytest.mark.parametrize("index", ["act_and_mul", "sample"])
def test_a_step_is_launched_again_when_memory_is_short(
    index: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, penalties and log probabilities are those of a rank that has enough."""
    params = {
        "temperature": 1.0,
        "seed": 3,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "top_logprobs": 2,
    }

    def run(step: int) -> list[Any]:
        executor, ready = start(folder)
        planner = Planner(executor, ready, 4)
        row = planner.row(0, [5, 6, 7, 5, 6], sampling(**params))
        own, calls = getattr(CpuOps, index), iter(range(100))

        def call(self: Any, *rest: Any) -> Any:
            if next(calls) == step:
                raise torch.OutOfMemoryError("out of memory")
            return own(self, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(CpuOps, index, call)
            planner.generate(row, 8)
        return [row.tokens, row.results]

    expected = run(99)
    for step in (0, 1, 4):
        assert run(step) == expected
    assert len(np.unique(expected[0])) > 3


def test_tokens_that_are_reported_are_not_chosen_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, [5, 6, 7], sampling())
    planner.prefill(row)
    assert isinstance(executor, TorchExecutor)

    def fail(tensors: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(executor.runner.transfers, "fetch", fail)
    with pytest.raises(torch.OutOfMemoryError):
        planner.run([row], [])
