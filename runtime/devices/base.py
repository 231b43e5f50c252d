"""What a device is: a folder of this package that provides an Executor, and, for torch devices, four small protocols.

    Executor      what the rank's main loop drives: start, step, close                    (every device)
    Ops           the arithmetic that differs from device to device                       (torch devices)
    Memory        how much there is, and how pages are laid out                           (torch devices)
    Collectives   sums and gathers across the ranks of one model                          (torch devices)
    Graphs        capture and replay of a step's kernels, where the device has them       (torch devices)

This file imports no torch at run time: the null device is one too.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from runtime.errors import StartError
from runtime.messages import RankReady, StartRank, StepPlan, StepResult

Progress = Callable[[str, float], None]  # phase name, fraction done

# device name -> module with `executor(rank: int) -> Executor`
DEVICES = {
    "cpu": "runtime.devices.cpu.device",
    "null": "runtime.devices.null.device",
}


class Executor(Protocol):
    """One rank's share of the model on one device."""

    def start(self, start: StartRank, progress: Progress) -> RankReady:
        """Loads weights and takes memory. Raises StartError with a one-line remedy."""
        ...

    def step(self, plan: StepPlan) -> StepResult | None:
        """Runs one step; the ranks that do not report return None."""
        ...

    def close(self) -> None: ...


def open_device(name: str, rank: int) -> Executor:
    """Raises StartError for a device that does not exist here."""
    if name not in DEVICES:
        raise StartError(f"--device {name} is unknown; choose one of {', '.join(sorted(DEVICES))}")
    return import_module(DEVICES[name]).executor(rank)
