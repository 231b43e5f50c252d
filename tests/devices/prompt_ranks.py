"""Ranks that share prompts in one process, each in a thread of its own. They share nothing else: each has all
weights, so that what differs from a single rank is what they do in attention."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.base import Device, ForwardBatch
from runtime.devices.cpu import device as cpu
from runtime.devices.executor import Pending
from runtime.devices.progress import without_progress
from runtime.devices.single_rank import SingleRank
from runtime.messages.attention_layout import AttentionLayout
from runtime.messages.ranks import StartRank
from runtime.messages.steps import StepPlan, StepResult
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.drive import start_rank

MOST_S = 60.0  # that a rank waits for the others


class Table:
    """Where ranks lay what the others take."""

    def __init__(self, size: int) -> None:
        self.laid: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=MOST_S)


class ThreadRanks(SingleRank):
    """The one of the Collectives that parts use, among threads."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table = table
        self.rank, self.size = rank, len(table.laid)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.table.laid[self.rank] = x
        self.table.barrier.wait()
        joined = torch.cat(self.table.laid, dim)
        self.table.barrier.wait()
        if self.meanwhile is not None:
            self.meanwhile()
        return joined


class Results:
    """A Pending of all ranks, whose results are the same."""

    def __init__(self, results: list[StepResult | None]) -> None:
        self.results = results

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult | None:
        first = self.results[0]
        assert first is not None
        for other in self.results[1:]:
            assert other is not None and other.token_ids.tolist() == first.token_ids.tolist()
        return first


class PromptRanks:
    """An Executor of several ranks."""

    def __init__(self, folder: Path, size: int, split: str, **options: Any) -> None:
        message = start_rank(folder, attention_parts=size, prompt_split=split, tp_size=size, **options)
        table, layout = Table(size), AttentionLayout(size, 1, size)
        # of each step and rank: tokens, and those of them whose queries it has computed
        self.shares: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self.num_cut = 0  # of these, those in two micro-batches

        def open_device(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
            one = structs.replace(start, tp_size=1, attention_parts=1)
            attention = AttentionRanks(
                layout, SingleRank(), ThreadRanks(table, rank), SingleRank(), SingleRank()
            )
            alone = cpu.open_device(one, 0, dtype)
            return replace(alone, attention=attention, programs=None)  # several ranks have no programs

        self.ranks = [
            TorchExecutor(start_torch_rank(rank, message, without_progress, open_device, cpu.FACTS))
            for rank in range(size)
        ]
        self.ready = self.ranks[0].ready
        self.threads = ThreadPoolExecutor(size)
        for rank in range(size):
            self.note_shares(rank)

    def note_shares(self, rank: int) -> None:
        """Writes down what the batches of a rank are."""
        inputs: Any = self.ranks[rank].runner.inputs
        make = inputs.batch

        def batch(*arguments: Any) -> ForwardBatch:
            made: ForwardBatch = make(*arguments)
            halves = (made,) if made.micro_batches is None else made.micro_batches
            self.num_cut += len(halves) - 1
            own = [len(half.positions if half.part is None else half.part.indices) for half in halves]
            self.shares[rank].append((len(made.positions), sum(own)))
            return made

        inputs.batch = batch

    def launch(self, plan: StepPlan) -> Pending:
        return Results(list(self.threads.map(lambda rank: rank.launch(plan).result(), self.ranks)))

    def close(self) -> None:
        self.threads.shutdown()
        for rank in self.ranks:
            rank.close()
