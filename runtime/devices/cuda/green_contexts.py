"""Green contexts: parts of a card's multiprocessors, with streams whose kernels run there alone.

Contexts of torch (torch.cuda.green_contexts) are each cut from the whole card, so two of them share
multiprocessors. Here both come from one split, by the driver's own functions as the package cuda-bindings has
them: one has what was split off, the other one what is left. torch launches on their streams as on any other
one, whichever context is current.
"""

import importlib
from collections.abc import Sequence
from typing import Protocol

import torch

from runtime.devices.partitions import Partition
from runtime.devices.streams import Stream
from runtime.errors import StartError
from runtime.messages.multiplexing import Division, Multiplexing

OPTION = "--enable-pdmux"
PACKAGE = "cuda-bindings"


class Status(Protocol):
    """The part of CUresult that is read."""

    name: str
    value: int


class SmResource(Protocol):
    """The part of CUdevSmResource that is read."""

    smCount: int


class Resource(Protocol):
    """The part of CUdevResource that is read."""

    sm: SmResource


class ResourceTypes(Protocol):
    """The part of CUdevResourceType that is used."""

    CU_DEV_RESOURCE_TYPE_SM: object


class Driver(Protocol):
    """What is used of cuda.bindings.driver. Each function returns a status, then its results."""

    CUdevResourceType: ResourceTypes

    def cuDeviceGet(self, ordinal: int) -> tuple[Status, object]:
        """-> device"""
        ...

    def cuDeviceGetDevResource(self, device: object, typename: object) -> tuple[Status, Resource]:
        """-> all of a device's multiprocessors"""
        ...

    def cuDevSmResourceSplitByCount(
        self, groups: int, resource: Resource, flags: int, least: int
    ) -> tuple[Status, Sequence[Resource], int, Resource]:
        """-> the groups, their number, and what is left"""
        ...

    def cuDevResourceGenerateDesc(self, resources: list[Resource], count: int) -> tuple[Status, object]:
        """-> a descriptor"""
        ...

    def cuGreenCtxCreate(self, descriptor: object, device: object, flags: int) -> tuple[Status, object]:
        """-> a green context"""
        ...

    def cuGreenCtxStreamCreate(self, context: object, flags: int, priority: int) -> tuple[Status, int]:
        """-> a stream of it"""
        ...


DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which must be given
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which must be given


class GreenPartitions:
    """Partitions (devices/partitions.py) of one GPU. Contexts live as long as the process."""

    def __init__(self, multiplexing: Multiplexing, partitions: list[Partition]) -> None:
        self.multiplexing = multiplexing
        self.partitions = partitions

    @property
    def least_rows(self) -> list[int]:
        """See Partitions.least_rows."""
        return self.multiplexing.least_rows(len(self.partitions))

    def of(self, num_rows: int) -> Partition:
        """See Partitions.of."""
        return self.partitions[self.multiplexing.choose(num_rows, len(self.partitions))]


def open_partitions(multiplexing: Multiplexing | None, torch_device: torch.device) -> GreenPartitions | None:
    """The partitions of a GPU; None: none are asked for. Raises StartError."""
    if multiplexing is None:
        return None
    properties = torch.cuda.get_device_properties(torch_device)
    unit = 8 if properties.major >= 9 else 2  # multiprocessors that the driver splits off together
    try:
        divisions = multiplexing.divisions(properties.multi_processor_count, unit)
    except ValueError as error:
        raise StartError(f"{OPTION}: {error}") from None
    driver = open_driver()
    torch.cuda.synchronize(torch_device)  # the driver has been started, and this device's context with it
    try:
        partitions = [split(driver, torch_device, division) for division in divisions]
    except RuntimeError as error:  # the driver lacks a function
        raise StartError(
            f"{OPTION}: the driver has no green contexts ({error}); install one of CUDA 12.5 or newer, or "
            "leave the option out"
        ) from None
    return GreenPartitions(multiplexing, partitions)


def open_driver() -> Driver:
    """The driver's functions. Raises StartError."""
    try:
        driver: Driver = importlib.import_module("cuda.bindings.driver")  # type: ignore[assignment]
    except ImportError as error:
        raise StartError(
            f"{OPTION} needs the package {PACKAGE}, which can't be imported ({error}); install it "
            f"(pip install {PACKAGE}), or leave the option out"
        ) from None
    return driver


def split(driver: Driver, torch_device: torch.device, division: Division) -> Partition:
    """Two contexts that share no multiprocessor, with a stream each. Raises StartError, and RuntimeError
    where the driver lacks a function."""
    status, device = driver.cuDeviceGet(torch_device.index)
    check(status)
    status, whole = driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    check(status)
    status, groups, count, rest = driver.cuDevSmResourceSplitByCount(1, whole, 0, division.prompts)
    check(status)
    found = Division(groups[0].sm.smCount if count else 0, rest.sm.smCount)
    if found != division:
        raise StartError(
            f"{OPTION}: the driver divides the card into {found.prompts} and {found.decodes} multiprocessors "
            f"in place of {division.prompts} and {division.decodes}; give divisions that it makes "
            "(--pdmux-config-path)"
        )
    return Partition(*(open_stream(driver, torch_device, device, part) for part in (groups[0], rest)))


def open_stream(driver: Driver, torch_device: torch.device, device: object, part: Resource) -> Stream:
    """A stream of a new context on a part of the card. Raises as `split`."""
    status, descriptor = driver.cuDevResourceGenerateDesc([part], 1)
    check(status)
    status, context = driver.cuGreenCtxCreate(descriptor, device, DEFAULT_STREAM)
    check(status)
    status, stream = driver.cuGreenCtxStreamCreate(context, NON_BLOCKING, 0)
    check(status)
    opened: Stream = torch.cuda.ExternalStream(int(stream), device=torch_device)
    return opened


def check(status: Status) -> None:
    """Raises StartError for what the driver refuses."""
    if status.value:
        raise StartError(f"{OPTION}: the driver can't divide the card ({status.name}); leave the option out")
