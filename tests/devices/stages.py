"""All stages of a pipeline in one process, one after another: links are queues."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.cpu import device as cpu
from runtime.devices.executor import Pending
from runtime.devices.facts import DeviceFacts
from runtime.devices.progress import without_progress
from runtime.messages.ranks import RankReady, StartRank
from runtime.messages.steps import StepPlan
from runtime.ranks.drafting.own_rows import own_rows
from runtime.ranks.model_runner import ModelRunner
from runtime.ranks.start import OpenDevice, start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.drive import start_rank

PATIENCE_S = 60.0  # only a failing test waits for so long


@dataclass
class Wires:
    """What has been sent and not received."""

    hidden: list[deque[Tensor]]  # to each stage
    tokens: list[deque[Tensor]]
    sent: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)  # kind, to whom, and shape
    changed: Condition = field(default_factory=Condition)

    def put(self, kind: str, stage: int, tensor: Tensor) -> None:
        """Sends hidden states or tokens to a stage."""
        with self.changed:
            self.sent.append((kind, stage, tuple(tensor.shape)))
            (self.hidden if kind == "hidden" else self.tokens)[stage].append(tensor)
            self.changed.notify_all()

    def take(self, waiting: deque[Tensor]) -> Tensor:
        """The next of what was sent, waiting for it."""
        with self.changed:
            assert self.changed.wait_for(lambda: waiting, PATIENCE_S), "nothing was sent"
            return waiting.popleft()

    @property
    def is_empty(self) -> bool:
        return not any([*self.hidden, *self.tokens])


class ListLinks:
    """StageLinks of one stage."""

    def __init__(self, wires: Wires, stage: int) -> None:
        self.wires = wires
        self.stage = stage

    def send_hidden(self, hidden: Tensor) -> None:
        self.wires.put("hidden", self.stage + 1, hidden)

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        hidden = self.wires.take(self.wires.hidden[self.stage])
        assert hidden.shape == shape and hidden.dtype == dtype
        return hidden

    def send_tokens(self, tokens: Tensor, stage: int) -> None:
        self.wires.put("tokens", stage, tokens)

    def receive_tokens(self, count: int) -> Tensor:
        tokens = self.wires.take(self.wires.tokens[self.stage])
        assert tokens.shape == (count,) and tokens.dtype == torch.int64
        return tokens


class StagedExecutor:
    """An Executor of a whole pipeline."""

    def __init__(self, stages: list[TorchExecutor], wires: Wires) -> None:
        self.stages = stages
        self.wires = wires
        counts = [stage.ready for stage in stages]
        self.ready: RankReady = structs.replace(
            counts[-1],
            **{
                name: min(getattr(ready, name) for ready in counts)
                for name in ("num_pages", "num_window_pages", "num_state_slots", "num_host_pages")
            },
        )

    def launch(self, plan: StepPlan) -> Pending:
        """Launches a step on all stages; the result is the last one's. Where this makes drafts, the others
        wait for it."""
        if own_rows(plan) is None:
            *before, last = [stage.launch(plan) for stage in self.stages]
        else:
            with ThreadPoolExecutor(len(self.stages)) as threads:
                *before, last = threads.map(lambda stage: stage.launch(plan), self.stages)
        assert all(step.result() is None for step in before), "one stage reports"
        return last

    @property
    def runner(self) -> ModelRunner:
        """The last stage's model runner: the one that samples."""
        return self.stages[-1].runner

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


def start_stages(
    folder: Path,
    count: int,
    *,
    facts: DeviceFacts = cpu.FACTS,
    open_whole: OpenDevice = cpu.open_device,
    **options: Any,
) -> StagedExecutor:
    """The stages of a pipeline over a checkpoint, on the cpu or another device in this process."""
    message = start_rank(folder, pp_size=count, **options)
    wires = Wires([deque() for _ in range(count)], [deque() for _ in range(count)])

    def open_device(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        alone = open_whole(structs.replace(start, pp_size=1), 0, dtype)
        return replace(alone, stage=message.stage_of(rank), links=ListLinks(wires, rank))

    return StagedExecutor(
        [
            TorchExecutor(start_torch_rank(rank, message, without_progress, open_device, facts))
            for rank in range(count)
        ],
        wires,
    )
