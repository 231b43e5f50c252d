"""Opens devices by their names: the executor of a rank, or a torch device alone.

The modules of devices are imported here and nowhere else, so that no device and no torch is loaded that a
rank does not use. The module of a torch device offers `FACTS` and `open_device(start, rank, dtype) ->
Device`; the null device, which needs no torch, has an executor of its own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from runtime.devices.executor import Executor
from runtime.devices.facts import DeviceFacts
from runtime.errors import StartError
from runtime.messages.ranks import StartRank

if TYPE_CHECKING:
    import torch

    from runtime.devices.base import Device

TORCH_DEVICES = {
    "cpu": "runtime.devices.cpu.device",
    "cuda": "runtime.devices.cuda.device",
    "npu": "runtime.devices.ascend.device",
}


class TorchDevice(Protocol):
    """The module of a torch device."""

    FACTS: DeviceFacts

    def open_device(self, start: StartRank, rank: int, dtype: "torch.dtype") -> "Device":
        """Takes this rank's device. Raises StartError with a one-line remedy."""
        ...


def torch_device(name: str) -> TorchDevice:
    """The module of a torch device. Raises StartError if there is none of this name."""
    if name not in TORCH_DEVICES:
        known = ", ".join(sorted((*TORCH_DEVICES, "null")))
        raise StartError(f"--device {name} is unknown; choose one of {known}")
    return cast(TorchDevice, import_module(TORCH_DEVICES[name]))


def open_executor(name: str, rank: int) -> Executor:
    """The executor of a rank on the device `name`. Raises StartError if there is no such device."""
    if name == "null":
        from runtime.devices.null.device import NullExecutor

        return NullExecutor(rank)
    device = torch_device(name)
    from runtime.ranks.torch_executor import TorchExecutor

    return TorchExecutor(rank, device.open_device, device.FACTS)
