"""Green contexts, by a double of the driver's functions (cuda.bindings.driver 13.5): a split gives each
multiprocessor away once."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.devices.cuda.green_contexts import open_partitions
from runtime.errors import StartError
from runtime.messages.multiplexing import Multiplexing

DEVICE = torch.device("cuda", 1)
DONE = SimpleNamespace(name="CUDA_SUCCESS", value=0)
REFUSED = SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED", value=801)


class Driver:
    """The driver of a card with 132 multiprocessors. A resource is a range of them."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")

    def __init__(self, unit: int = 8) -> None:
        self.unit = unit
        self.streams: dict[int, range] = {}

    def cuDeviceGet(self, ordinal: int) -> Any:
        return DONE, f"device {ordinal}"

    def cuDeviceGetDevResource(self, device: str, typename: str) -> Any:
        assert (device, typename) == ("device 1", "sm")
        return DONE, self.resource(range(132))

    def resource(self, sms: range) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=len(sms)), sms=sms)

    def cuDevSmResourceSplitByCount(self, groups: int, resource: Any, flags: int, least: int) -> Any:
        assert (groups, flags) == (1, 0)
        count = -(-least // self.unit) * self.unit
        return DONE, [self.resource(resource.sms[:count])], 1, self.resource(resource.sms[count:])

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> Any:
        assert count == len(resources) == 1
        return DONE, resources[0].sms

    def cuGreenCtxCreate(self, descriptor: range, device: str, flags: int) -> Any:
        assert (device, flags) == ("device 1", 1)
        return DONE, descriptor

    def cuGreenCtxStreamCreate(self, context: range, flags: int, priority: int) -> Any:
        assert (flags, priority) == (1, 0)
        self.streams[100 + len(self.streams)] = context
        return DONE, 99 + len(self.streams)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    double: Any = Driver()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=double)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=double))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", double)
    properties = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: number)
    return double


def test_both_parts_share_no_multiprocessor(driver: Driver) -> None:
    opened = open_partitions(Multiplexing(num_divisions=3), DEVICE)
    assert opened is not None and len(driver.streams) == 6 and opened.least_rows == [0, 24, 36]
    sizes = []
    for rows in (1, 24, 36):
        streams: Any = opened.of(rows)
        prompts, decodes = (driver.streams[stream] for stream in streams)
        assert sorted([*prompts, *decodes]) == list(range(132)), "each has one owner"
        sizes.append((len(prompts), len(decodes)))
    assert sizes == [(112, 20), (96, 36), (72, 60)]


def test_none_are_asked_for() -> None:
    assert open_partitions(None, DEVICE) is None


def test_sizes_that_the_driver_does_not_make(driver: Driver) -> None:
    driver.unit = 16
    with pytest.raises(StartError, match="into 112 and 20 multiprocessors in place of 104 and 28"):
        open_partitions(Multiplexing(manual=((112, 20, 1), (104, 28, 4))), DEVICE)
    with pytest.raises(StartError, match=r"\[112, 40\] of manual_divisions adds up to 152"):
        open_partitions(Multiplexing(manual=((112, 40, 1),)), DEVICE)


def test_drivers_without_green_contexts(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGreenCtxCreate", lambda *_: (REFUSED, None))
    with pytest.raises(StartError, match="--enable-pdmux: .*CUDA_ERROR_NOT_SUPPORTED.*leave the option out"):
        open_partitions(Multiplexing(), DEVICE)

    def lacking(*_: object) -> None:
        raise RuntimeError("function cuGreenCtxStreamCreate is not found")

    monkeypatch.setattr(driver, "cuGreenCtxCreate", lambda *_: (DONE, range(8)))
    monkeypatch.setattr(driver, "cuGreenCtxStreamCreate", lacking)
    with pytest.raises(StartError, match="is not found.*install one of CUDA 12.5 or newer"):
        open_partitions(Multiplexing(), DEVICE)


def test_without_the_package(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(StartError, match="needs the package cuda-bindings.*pip install cuda-bindings"):
        open_partitions(Multiplexing(), DEVICE)
