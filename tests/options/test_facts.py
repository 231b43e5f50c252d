"""The table of devices, against what the devices say of themselves."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.devices.ascend.facts import FACTS as NPU
from runtime.devices.base import DEVICES as FOLDERS
from runtime.devices.base import Facts
from runtime.devices.cpu.facts import FACTS as CPU
from runtime.devices.cuda.facts import FACTS as CUDA
from runtime.devices.facts import DeviceFacts
from runtime.options import facts
from runtime.options.facts import DEVICES
from runtime.options.table import by_name


def test_options_and_devices_know_the_same_devices() -> None:
    device = by_name()["device"]
    assert set(DEVICES) == set(FOLDERS) == set(device.choices or ()) - set(device.later) - {"auto"}


@pytest.mark.parametrize(
    ("known", "own"),
    [(DEVICES["cpu"], CPU), (DEVICES["npu"], NPU), (DEVICES["cuda"], CUDA)],
    ids=["cpu", "npu", "cuda"],
)
def test_devices_are_described_alike(known: DeviceFacts, own: Facts) -> None:
    assert {*known.dtypes, *known.other_dtypes} == set(own.dtypes) and (
        known.graph_max_running > 0
    ) == own.has_graphs
    assert known.schemes == own.schemes


@pytest.mark.parametrize("known", DEVICES.values(), ids=list(DEVICES))
def test_facts_are_possible(known: DeviceFacts) -> None:
    assert known.chunk_tokens >= known.page_size >= 1 and 0 < known.memory_fraction <= 1
    for option, backends in (
        ("attention_backend", (known.attention_backend,)),
        ("sampling_backend", known.sampling_backends),
    ):
        row = by_name()[option]
        assert set(backends) <= set(row.choices or ()) - set(row.later)


@pytest.mark.parametrize(
    ("drivers", "packages", "name"),
    [
        (["davinci0"], ["torch", "torch_npu"], "npu"),
        (["davinci0"], ["torch"], "cpu"),
        ([], ["torch_npu", "triton", "torch for cards"], "cpu"),
        (["nvidia0", "nvidiactl"], ["triton", "torch for cards"], "cuda"),
        (["nvidia0"], ["torch for cards"], "cpu"),
        (["nvidia0"], ["triton", "torch"], "cpu"),
        (["nvidiactl"], ["triton", "torch for cards"], "cpu"),
        (["davinci0", "nvidia3"], ["triton", "torch for cards"], "cuda"),
    ],
)
def test_auto_takes_what_has_driver_and_packages(
    drivers: list[str], packages: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("dev", "torch", "torch/lib"):
        (tmp_path / folder).mkdir()
    for driver in drivers:
        (tmp_path / "dev" / driver).touch()
    if "torch for cards" in packages:
        (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    found = {
        package.split()[0]: SimpleNamespace(origin=str(tmp_path / package.split()[0] / "__init__.py"))
        for package in packages
    }
    monkeypatch.setattr(facts, "find_spec", found.get)
    assert facts.best_device(tmp_path) == name
