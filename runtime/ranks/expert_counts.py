"""How tokens spread over experts, counted on the device.

    layers  ── add, in the step ──►  step [layers, experts]  ── behind the step ──►  total, and a row of the record while it records

The host waits for none of it. A captured step adds to the same tensor as any other, and what is done behind a
step is launched one by one.
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
from runtime.ranks.transfers import Fetched, Transfers


class Counted:
    """Counts on their way to the host."""

    def __init__(self, fetched: Fetched, finish: Callable[[np.ndarray], ExpertCounts]) -> None:
        self._fetched = fetched
        self._finish = finish
        self._result: ExpertCounts | None = None

    def is_done(self) -> bool:
        return self._result is not None or self._fetched.is_done()

    def result(self) -> ExpertCounts:
        if self._result is None:
            self._result = self._finish(self._fetched.arrays()[0])
        return self._result


class Untold:
    """Of a rank that says nothing."""

    def is_done(self) -> bool:
        return True

    def result(self) -> None:
        return None


class ExpertLoad:
    """The counts of one rank. Where all ranks have all tokens the first one counts for all."""

    def __init__(
        self, device: Device, layers: dict[int, SparseFeedForward], num_layers: int, num_steps: int
    ) -> None:
        """`layers` by their place in the model, at least one; `num_steps` that the record holds."""
        self.ranks = device.collectives
        self.places = tuple(layers)
        self.num_layers = num_layers
        self.is_summed = device.all_to_all is not None
        num_experts = next(iter(layers.values())).local.full
        self.step = torch.zeros(len(layers), num_experts, dtype=torch.int32, device=device.torch_device)
        self.total = torch.zeros(self.step.shape, dtype=torch.int64, device=device.torch_device)
        self.record = torch.zeros(num_steps, *self.step.shape, dtype=torch.int32, device=device.torch_device)
        # of the record: number, tokens, and how many of them were decodes
        self.steps = deque[tuple[int, int, int]](maxlen=num_steps)
        self.next = 0  # row of it
        self.is_recording = False
        self.ended_step = -1
        self.attach(list(layers.values()))

    @property
    def num_bytes(self) -> int:
        return self.step.nbytes + self.total.nbytes + self.record.nbytes

    def attach(self, layers: list[SparseFeedForward]) -> None:
        """These count, which are built like those before."""
        if self.is_summed or self.ranks.rank == 0:
            for layer, row in zip(layers, self.step, strict=True):
                layer.counts = row

    def ended(self, plan: StepPlan) -> None:
        """Behind the forward pass of a step."""
        # it is launched again, as there was no memory for what comes behind the forward pass
        if plan.step == self.ended_step:
            self.step.zero_()
            return
        self.ended_step = plan.step
        self.total += self.step
        if self.is_recording:
            self.record[self.next].copy_(self.step)
            self.next = (self.next + 1) % len(self.record)
            self.steps.append((plan.step, int(plan.counts.sum()), plan.num_decodes))
        self.step.zero_()

    def serve(self, command: CountExperts, transfers: Transfers) -> Pending:
        match command.action:
            case "start":
                self.forget()
                self.is_recording = True
            case "stop":
                self.is_recording = False
        num_steps = len(self.steps)
        file, error = self.dump(Path(command.folder)) if command.action == "dump" else ("", "")
        total = self.summed(self.total.clone())
        if self.ranks.rank != 0:
            return Untold()
        return Counted(
            transfers.fetch([total]),
            lambda counts: ExpertCounts(command.id, self.places, counts.ravel(), num_steps, file, error),
        )

    def forget(self) -> None:
        self.steps.clear()
        self.next = 0

    def summed(self, counts: Tensor) -> Tensor:
        return self.ranks.all_reduce(counts) if self.is_summed else counts

    def dump(self, folder: Path) -> tuple[str, str]:
        """Writes the record, the oldest step first, and forgets it; the host waits for it. -> the file, or
        why there is none"""
        if not (count := len(self.steps)):
            return "", "nothing was recorded"
        order = [(self.next - count + i) % len(self.record) for i in range(count)]
        record = self.summed(self.record).cpu().numpy()[order]
        steps = np.array(self.steps, np.int64).reshape(count, 3)
        self.forget()
        if self.ranks.rank != 0:
            return "", ""
        whole = np.zeros((count, self.num_layers, record.shape[2]), np.int32)
        whole[:, self.places] = record
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


def open_load(device: Device, mlps: list[object], num_steps: int | None) -> ExpertLoad | None:
    """Of a model's feed-forwards in order; None: nobody wants to know, or there are no experts."""
    layers = {i: mlp for i, mlp in enumerate(mlps) if isinstance(mlp, SparseFeedForward)}
    return None if num_steps is None or not layers else ExpertLoad(device, layers, len(mlps), num_steps)
