"""Devices of which `runtime check` plans: this machine's accelerators, as their tools tell, or any others."""

import re
from collections.abc import Callable

from msgspec import structs

from runtime.cli.doctor.probe import ask
from runtime.errors import OptionsError
from runtime.options.facts import MachineFacts
from runtime.options.plan import Plan
from runtime.options.split_advice import Devices

MIB = 1 << 20


def _cuda_sizes() -> list[int]:
    listed = ask("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return [int(line) for line in listed.split() if line.isdigit()]


def _npu_sizes() -> list[int]:
    """The MiB of each NPU: npu-smi prints two lines for each, and the second ends with its memory in use and
    in all."""
    pairs = re.findall(r"\d+\s*/\s*(\d+)\s*\|\s*$", ask("npu-smi", "info"), re.M)
    return [int(size) for size in pairs[1::2]]


TOOLS: dict[str, Callable[[], list[int]]] = {"cuda": _cuda_sizes, "npu": _npu_sizes}  # MiB of each device


def local_devices(name: str) -> Devices | None:
    """The devices of a kind that this machine has, each as large as the smallest; None: there are none, or
    their tool does not answer."""
    sizes = TOOLS[name]() if name in TOOLS else []
    return Devices(len(sizes), min(sizes) * MIB) if sizes else None


def devices_of(plan: Plan, count: int | None, gib: float | None) -> Devices | None:
    """The devices of each node: `count` of `gib` GiB, and what is None as on this machine; both None: those
    of this machine, or None where its ranks share one memory or no tool answers. Raises OptionsError where
    half of it is known."""
    found = local_devices(plan.parallel.device)
    if count is None and gib is None:
        return found
    if gib is not None:
        size = int(gib * 2**30)
    elif found is not None:
        size = found.memory_bytes
    else:
        raise OptionsError(["--devices needs --device-memory, the GiB of each, which is not known here"])
    return Devices(count or (plan.parallel.processes_on_node if found is None else found.count), size)


def seen_by_ranks(plan: Plan, machine: MachineFacts, devices: Devices | None) -> MachineFacts:
    """The machine with the memory of the devices that the ranks of a node have; `devices` None: as it is."""
    if devices is None:
        return machine
    return structs.replace(machine, memory_bytes=devices.memory_bytes * plan.parallel.processes_on_node)


def positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """A type of argparse: numbers above 0."""

    def convert(text: str) -> int | float:
        if not 0 < (number := kind(text)) < 1e6:
            raise ValueError
        return number

    convert.__name__ = "number above 0"  # argparse puts it into its error
    return convert
