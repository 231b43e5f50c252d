"""The table of devices, against what the devices say of themselves."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.devices.facts import DeviceFacts
from runtime.errors import OptionsError
from runtime.options import facts
from runtime.options.facts import DEVICES, device_facts, this_machine
from runtime.options.table import by_name
from runtime.ranks.open_executor import DEVICES as MODULES


def test_options_and_devices_know_the_same_devices() -> None:
    device = by_name()["device"]
    assert set(DEVICES) == set(MODULES) == set(device.choices or ()) - set(device.later) - {"auto"}


@pytest.mark.parametrize("known", DEVICES.values(), ids=list(DEVICES))
def test_facts_are_possible(known: DeviceFacts) -> None:
    assert known.chunk_tokens >= known.page_size >= 1 and 0 < known.memory_fraction <= 1
    for option, backends in (
        ("attention_backend", (known.attention_backend,)),
        ("sampling_backend", known.sampling_backends),
        ("mm_attention_backend", known.tower_attentions),
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


def test_this_machine_is_measured() -> None:
    machine = this_machine()
    assert machine.cores >= 1 and machine.memory_bytes > 2**20 and machine.entropy != this_machine().entropy


def test_an_unknown_device() -> None:
    with pytest.raises(OptionsError, match="--device tpu is unknown"):
        device_facts("tpu")
