"""Opens devices by their names: the executor of a rank, or a torch device alone.

Modules of devices are imported here and nowhere else, so that a rank loads its own device only. A torch
device's module offers `FACTS` and `open_device`, and ranks/torch_executor.py computes its steps. The module
of another device (null) offers `open_executor`.
"""

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Protocol, cast

from runtime.deferred_torch import deferring_torch
from runtime.devices.executor import Executor
from runtime.devices.facts import DeviceFacts
from runtime.devices.progress import Progress
from runtime.errors import StartError
from runtime.messages.ranks import StartRank
from runtime.ranks.torch_libraries import import_ahead, loading_libraries

if TYPE_CHECKING:
    import torch

    from runtime.devices.base import Device

DEVICES = {
    "cpu": "runtime.devices.cpu.device",
    "cuda": "runtime.devices.cuda.device",
    "npu": "runtime.devices.ascend.device",
    "null": "runtime.devices.null.device",
}

# devices whose ranks have no use for the deferred parts: others compile kernels with them
DEFERS_TORCH = ("cpu",)

# devices whose torch has no other libraries than those for the CPU
LOADS_AHEAD = ("cpu",)

# modules that the ranks of every torch device use, with what these import; most families are kinds of Llama
USED_BY_STARTS = ("runtime.ranks.torch_executor", "runtime.models.llama")


class TorchDevice(Protocol):
    """The module of a torch device."""

    FACTS: DeviceFacts

    def open_device(self, start: StartRank, rank: int, dtype: "torch.dtype") -> "Device":
        """Takes this rank's device. Raises StartError with a one-line remedy."""
        ...


class OwnExecutor(Protocol):
    """The module of a device that does not compute with torch."""

    def open_executor(self, rank: int, start: StartRank, progress: Progress) -> Executor:
        """Starts one rank. Raises StartError with a one-line remedy."""
        ...


def open_executor(
    rank: int, start: StartRank, progress: Progress, reported: Callable[[int, int], None] | None = None
) -> Executor:
    """Starts a rank on the device that `start` names: loads weights and allocates memory. `reported` is
    called with a step, and how many parts of the pages that it computes are in host memory. Raises
    StartError with a one-line remedy, also if there is no such device."""
    module = _import_device(start.device)
    if hasattr(module, "open_executor"):
        return cast(OwnExecutor, module).open_executor(rank, start, progress)
    from runtime.ranks.start import start_torch_rank
    from runtime.ranks.step_copies import unreported
    from runtime.ranks.torch_executor import TorchExecutor

    device = cast(TorchDevice, module)
    return TorchExecutor(
        start_torch_rank(rank, start, progress, device.open_device, device.FACTS, reported or unreported)
    )


def import_device(name: str) -> None:
    """Imports what a rank on the device `name` needs before it can load a model, and takes no memory of the
    device. Raises StartError if there is no such device.

    Modules are no garbage: looking for some takes a fifth of the time to import torch, and the collections of
    a running rank need not look at them either. Parts of torch that ranks on the CPU never use are deferred.
    """
    if all(module in sys.modules for module in (DEVICES.get(name), *USED_BY_STARTS)):
        return  # forks share what was imported: what they write to becomes their own
    was_enabled = gc.isenabled()
    deferring = deferring_torch() if name in DEFERS_TORCH else nullcontext()
    gc.disable()
    try:
        if name in LOADS_AHEAD:
            with loading_libraries():
                import_ahead()
        with reading_no_sources(), deferring:
            module = _import_device(name)
            if hasattr(module, "open_device"):
                for needed in USED_BY_STARTS:
                    import_module(needed)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def reading_no_sources() -> Iterator[None]:
    """Has `inspect` say file, line and module of a frame without reading source files meanwhile.

    torch asks for these of its hundred operators that are written in Python, for messages, when it is
    imported. For lines of text that torch does not use, and to be right about modules that were replaced,
    `inspect` reads files and resolves the paths of all modules: a fifth of the calls of the whole import.
    """
    full_info, full_module = inspect.getframeinfo, inspect.getmodule

    def frame_info(frame: FrameType | TracebackType, context: int = 1) -> inspect.Traceback:
        return full_info(frame, context=0)

    def module_of(object: object, _filename: str | None = None) -> ModuleType | None:
        if isinstance(object, FrameType):
            return sys.modules.get(object.f_globals.get("__name__", ""))
        return full_module(object, _filename)

    inspect.getframeinfo, inspect.getmodule = frame_info, module_of
    try:
        yield
    finally:
        inspect.getframeinfo, inspect.getmodule = full_info, full_module


def torch_device(name: str) -> TorchDevice:
    """The module of the torch device `name`. Raises StartError if there is no such device, or if it is not a
    torch device."""
    module = _import_device(name)
    if not hasattr(module, "open_device"):
        raise StartError(f"--device {name} computes nothing that could be measured; choose another")
    return cast(TorchDevice, module)


def _import_device(name: str) -> ModuleType:
    if name not in DEVICES:
        raise StartError(f"--device {name} is unknown; choose one of {', '.join(sorted(DEVICES))}")
    return import_module(DEVICES[name])
