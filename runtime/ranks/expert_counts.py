"""Counts of the tokens that each expert computes, kept on the device.

    layers ── add, within a step ──► step [layers, experts] ── after the step ──► total, and row of record

The host waits for none of it. A captured step adds to the same tensor as any other; what follows a step is
launched without a graph.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import time_ns

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.executor import Pending
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.messages.ranks import CountExperts, ExpertCounts
from runtime.messages.steps import StepPlan
from runtime.models.base import Model
from runtime.ranks.transfers import Fetched, Transfers

ALL_STEPS = -1  # as number of steps: the record holds all of them
ROWS = 256  # steps of such a record that stay on the device, before they move to host memory together


class PendingCounts:
    """Counts on their way to the host. See Pending."""

    def __init__(self, fetched: Fetched, finish: Callable[[np.ndarray], ExpertCounts]) -> None:
        self._fetched = fetched
        self._finish = finish
        self._result: ExpertCounts | None = None

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._result is not None or self._fetched.is_done()

    def result(self) -> ExpertCounts:
        """The counts, when they have arrived."""
        if self._result is None:
            self._result = self._finish(self._fetched.arrays()[0])
        return self._result


class UnreportedCounts:
    """Counts of a rank that does not report. See Pending."""

    def is_done(self) -> bool:
        """Always."""
        return True

    def result(self) -> None:
        """Nothing: rank 0 reports."""
        return None


class ExpertLoad:
    """The expert counts of one rank. If all ranks have all tokens, rank 0 counts for all."""

    def __init__(
        self, device: Device, layers: dict[int, SparseFeedForward], num_layers: int, num_steps: int
    ) -> None:
        """`layers`: those with experts, at least one, by their index in the model; `num_steps`: steps that
        the record holds, or ALL_STEPS."""
        self.ranks = device.collectives
        self.layer_indices = tuple(layers)
        self.num_layers = num_layers
        self.is_summed = device.all_to_all is not None
        num_experts = next(iter(layers.values())).num_experts
        self.step = torch.zeros(len(layers), num_experts, dtype=torch.int32, device=device.torch_device)
        self.total = torch.zeros(self.step.shape, dtype=torch.int64, device=device.torch_device)
        self.holds_all = num_steps == ALL_STEPS
        rows = ROWS if self.holds_all else num_steps
        self.record = torch.zeros(rows, *self.step.shape, dtype=torch.int32, device=device.torch_device)
        self.moved: list[Tensor] = []  # full records in host memory, the oldest first; with ALL_STEPS
        # for each row of the record its step, the step's tokens, and its decodes
        self.steps = deque[tuple[int, int, int]](maxlen=None if self.holds_all else num_steps)
        self.next = 0  # the next row of the record
        self.is_recording = False
        self.ended_step = -1
        self.attach(list(layers.values()))

    @property
    def num_bytes(self) -> int:
        """Device memory of the counts."""
        return self.step.nbytes + self.total.nbytes + self.record.nbytes

    def attach(self, layers: list[SparseFeedForward]) -> None:
        """Makes these layers count, which have the shapes of those before them."""
        if self.is_summed or self.ranks.rank == 0:
            for layer, row in zip(layers, self.step, strict=True):
                layer.counts = row

    def ended(self, plan: StepPlan) -> None:
        """Adds the counts of a step to total and record; called after its forward pass was launched."""
        # the step was launched again, because sampling after its first forward pass found no memory
        if plan.step == self.ended_step:
            self.step.zero_()
            return
        self.ended_step = plan.step
        self.total += self.step
        if self.is_recording:
            self.record[self.next].copy_(self.step)
            self.next = (self.next + 1) % len(self.record)
            if self.holds_all and self.next == 0:
                self.moved.append(self.record.to("cpu", copy=True))  # waits for the device
            self.steps.append((plan.step, int(plan.counts.sum()), plan.num_decodes))
        self.step.zero_()

    def serve(self, command: CountExperts, transfers: Transfers) -> Pending:
        """Executes a CountExperts; the result is its ExpertCounts on rank 0."""
        match command.action:
            case "start":
                self.clear_record()
                self.is_recording = True
            case "stop":
                self.is_recording = False
        num_steps = len(self.steps)
        file, error = self.dump(Path(command.folder)) if command.action == "dump" else ("", "")
        total = self.summed(self.total.clone())
        if self.ranks.rank != 0:
            return UnreportedCounts()
        return PendingCounts(
            transfers.fetch([total]),
            lambda counts: ExpertCounts(
                command.id, self.layer_indices, counts.ravel(), num_steps, file, error
            ),
        )

    def clear_record(self) -> None:
        """Empties the record."""
        self.steps.clear()
        self.moved.clear()
        self.next = 0

    def summed(self, counts: Tensor) -> Tensor:
        """The counts of all ranks; may overwrite `counts`."""
        return self.ranks.all_reduce(counts) if self.is_summed else counts

    def _rows(self, count: int) -> np.ndarray:
        """The record of the last `count` steps, int32 [count, layers with experts, experts], the oldest
        first."""
        if self.holds_all:
            parts = (*self.moved, self.record[: self.next].clone())
            return np.concatenate([self.summed(part.to(self.record.device)).cpu().numpy() for part in parts])
        order = [(self.next - count + i) % len(self.record) for i in range(count)]
        record: np.ndarray = self.summed(self.record).cpu().numpy()[order]
        return record

    def dump(self, folder: Path) -> tuple[str, str]:
        """Writes the record to a file, the oldest step first, and clears it; the host waits for the device.
        Returns the file's path, "" if there is none, and an error, "" if there is none."""
        if not (count := len(self.steps)):
            return "", "nothing was recorded"
        record = self._rows(count)
        steps = np.array(self.steps, np.int64).reshape(count, 3)
        self.clear_record()
        if self.ranks.rank != 0:
            return "", ""
        whole = np.zeros((count, self.num_layers, record.shape[2]), np.int32)
        whole[:, self.layer_indices] = record
        file = folder / f"expert_distribution_{time_ns()}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(
                save(
                    {
                        "logical_count": whole,
                        "step": steps[:, 0].copy(),
                        "num_tokens": steps[:, 1].copy(),
                        "num_decodes": steps[:, 2].copy(),
                    }
                )
            )
        except OSError as fault:
            return "", f"{folder}: {fault.strerror or fault}"
        return str(file), ""


def open_load(device: Device, model: Model, num_steps: int | None) -> ExpertLoad | None:
    """Counts of the tokens of each expert of a model; None: there are no experts, or counting is off
    (`num_steps` is None)."""
    mlps = [getattr(layer, "mlp", None) for layer in model.layers] if num_steps is not None else []
    layers = {i: mlp for i, mlp in enumerate(mlps) if isinstance(mlp, SparseFeedForward)}
    return None if num_steps is None or not layers else ExpertLoad(device, layers, len(mlps), num_steps)


def forget_step(load: ExpertLoad | None) -> None:
    """Drops the counts of the profile run, where there are some."""
    if load is not None:
        load.step.zero_()
