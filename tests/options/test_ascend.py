"""Flags that the reference supports on Ascend: what works on the CPU device works on an NPU, with the defaults and choices of there."""

import json
from pathlib import Path

import msgspec
import pytest

from runtime.errors import OptionsError
from runtime.models.config import read_config
from runtime.options.facts import DEVICES, DeviceFacts, MachineFacts
from runtime.options.given import from_argv
from runtime.options.plan import resolve
from runtime.options.table import Row, rows

# ascend.json: of each flag its default there, if it is another one, and the choices that are named
REFERENCE = json.loads((Path(__file__).parent / "ascend.json").read_text())
SUPPORTED = {flag: (default, choices) for flag, default, choices in REFERENCE["flags"]}
MODEL = read_config(str(Path(__file__).parents[2] / "runtime" / "pocket"))
MACHINE = MachineFacts(cores=8, memory_bytes=2**36, entropy=1)
NPU, CPU = (msgspec.structs.replace(DEVICES[name], dtypes=("bfloat16", "float16")) for name in ("npu", "cpu"))

VALUES = {
    "--fastapi-root-path": "/llm", "--max-total-tokens": "4096", "--tensor-parallel-size": "2", "--preferred-sampling-params": "{}",
    "--constrained-json-whitespace-pattern": " ?", "--log-level": "debug", "--host": "0.0.0.0", "--device": "npu",
    "--lora-paths": "name=/adapter",
}
BESIDE = {
    "--expert-parallel-size": "--tensor-parallel-size 1", "--constrained-json-whitespace-pattern": "--grammar-backend llguidance",
    "--hicache-ratio": "--enable-hierarchical-cache", "--hicache-size": "--enable-hierarchical-cache",
    "--hicache-write-policy": "--enable-hierarchical-cache", "--hicache-io-backend": "--enable-hierarchical-cache",
    "--hicache-mem-layout": "--enable-hierarchical-cache --hicache-io-backend direct",
    "--hicache-storage-backend": "--enable-hierarchical-cache", "--schedule-low-priority-values-first": "--enable-priority-scheduling",
    "--priority-scheduling-preemption-threshold": "--enable-priority-scheduling",
}
# of what the reference names: the choices that are refused, with the reason
OTHERWISE = {
    ("--sampling-backend", "pytorch"): "npu, which has ascend",  # it would make the host wait at each step
}


def working() -> dict[str, Row]:
    found = {flag: row for row in rows() for flag in (row.flag, *row.aliases)}
    return {flag: found[flag] for flag in SUPPORTED if flag in found and found[flag].status == "works"}


def cases() -> list[tuple[str, str | None]]:
    """Each flag with its default on Ascend and the choices there that are here; flags without either with a value of their type."""
    found: list[tuple[str, str | None]] = []
    for flag, row in working().items():
        default, choices = SUPPORTED[flag]
        wanted = [choice for choice in choices if choice not in row.later]
        if default is not None:
            wanted.append(str(default))
        if row.type == "bool":
            found.append((flag, None))
        elif wanted or not row.choices:
            found += [(flag, value) for value in wanted or [VALUES.get(flag, "1")]]
    return found


def problems(flag: str, value: str | None, device: DeviceFacts) -> set[str]:
    """One sentence each, without the name of the device."""
    words = [*BESIDE.get(flag, "").split(), flag, *([] if value is None else [value])]
    try:
        resolve(from_argv(words), MODEL, device, MACHINE)
    except OptionsError as error:
        return {line.replace(device.name, "DEVICE") for line in str(error).splitlines()}
    return set()


def test_there_are_many() -> None:
    assert len(working()) > 80 and len(cases()) > 90
    assert all(flag in working() for flag in (*VALUES, *BESIDE)), "what is told here of flags is used"


@pytest.mark.parametrize(("flag", "value"), cases())
def test_what_works_on_the_cpu_works_on_an_npu(flag: str, value: str | None) -> None:
    found = problems(flag, value, NPU)
    if (flag, value) in OTHERWISE:
        assert any(OTHERWISE[flag, str(value)].replace("npu", "DEVICE") in problem for problem in found)
    else:
        assert found <= problems(flag, value, CPU)
