"""The choice among builds of the CPU kernels, and the check of one before a rank uses it."""

import ctypes
import io
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime import log
from runtime.cli.doctor.machine import examine
from runtime.cli.doctor.probe import Finding
from runtime.devices.cpu import self_check
from runtime.devices.cpu.kernels import choice, levels, library
from runtime.devices.cpu.kernels.levels import LEVELS, Level, cpu_flags, supported_levels
from runtime.devices.cpu.matrices import Kind
from runtime.errors import StartError

BUILT = [level for level in supported_levels() if level.path.is_file()]
pytestmark = pytest.mark.skipif(not BUILT, reason="this machine runs no kernels")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The log."""
    stream = io.StringIO()
    log.setup("info", "json", stream)
    yield stream
    log.silence()


def kernels_of_doctor() -> Finding:
    return next(one for one in examine(host="127.0.0.1", port=0) if one.name == "cpu kernels")


@pytest.mark.parametrize("name", ["avx513", "i8mm" if platform.machine() == "x86_64" else "avx2"])
def test_a_level_that_there_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not silence and torch, and not a process that dies of an unknown instruction."""
    monkeypatch.setenv(choice.VARIABLE, name)
    with pytest.raises(StartError, match=f"{name} is no level .* choose one of .*{BUILT[-1].name}, none"):
        choice.usable_levels()
    found = kernels_of_doctor()
    assert found.verdict == "problem" and f"{choice.VARIABLE}={name}" in found.advice


def test_a_level_that_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LIBRARIES", tmp_path)
    monkeypatch.setenv(choice.VARIABLE, BUILT[0].name)
    with pytest.raises(StartError, match=f"{BUILT[0].name} is not built; choose one of none"):
        choice.usable_levels()
    monkeypatch.delenv(choice.VARIABLE)
    assert choice.usable_levels() == ()
    found = kernels_of_doctor()
    assert "torch computes, products take" in found.value and "install g++" in found.advice


def test_what_a_better_build_would_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built is only the least level of this machine."""
    if len(BUILT) < 2:
        pytest.skip("this machine runs one level")
    least, path = BUILT[-1], BUILT[-1].path
    monkeypatch.setattr(levels, "LIBRARIES", tmp_path)
    least.path.symlink_to(path)
    assert choice.usable_levels() == (least,)
    found = kernels_of_doctor()
    assert found.value.startswith(f"{least.name}; this CPU has more: ") and "install" in found.advice
    assert f"{BUILT[0].name} ({BUILT[0].brings})" in found.value
    monkeypatch.undo()
    monkeypatch.setenv(choice.VARIABLE, least.name)
    assert kernels_of_doctor().advice == f"unset {choice.VARIABLE}"


class WrongFunctions:
    """The functions of a build whose products with weights of one kind are off by a thousandth."""

    def __init__(self, functions: ctypes.CDLL, kind: Kind) -> None:
        self._functions, self._kind = functions, kind
        functions.kernels_try_multiply.argtypes = [ctypes.c_void_p] * 4

    def __getattr__(self, name: str) -> Any:
        if name != "kernels_try_multiply":
            return getattr(self._functions, name)

        def multiply(team: int, product: int, matrix: int, step: int) -> int:
            failed = self._functions.kernels_try_multiply(team, product, matrix, step)
            if ctypes.c_int.from_address(matrix).value == self._kind:  # weights::Matrix::kind
                output = library.Step.from_address(step).output
                row = (ctypes.c_float * self_check.OUTPUTS).from_address(output)
                row[:] = [1.001 * value for value in row]
            return failed

        return multiply


@pytest.mark.parametrize("kind", [Kind.BFLOAT16, Kind.INT8, Kind.INT4_ZEROS, Kind.Q6_K, Kind.MXFP4])
def test_a_level_that_computes_something_else(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: io.StringIO
) -> None:
    """The next one computes, and the log has one line."""
    wrong, plain, load = replace(BUILT[0], name=f"wrong-{kind.name}"), BUILT[0].path, library.load_functions
    monkeypatch.setattr(levels, "LIBRARIES", tmp_path)
    for level in (wrong, BUILT[0]):
        level.path.symlink_to(plain)

    def functions(level: Level) -> Any:
        return load(level) if level.name != wrong.name else WrongFunctions(load(level), kind)

    monkeypatch.setattr(library, "load_functions", functions)
    monkeypatch.setattr(choice, "supported_levels", lambda: (wrong, BUILT[0]))
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    found = self_check.load_library()
    assert found is not None and found.level == BUILT[0]
    assert lines.getvalue().count("\n") == 1
    assert f"wrong products of {kind.name}" in lines.getvalue() and wrong.name in lines.getvalue()


def test_a_level_whose_instructions_the_processor_refuses(
    monkeypatch: pytest.MonkeyPatch, lines: io.StringIO
) -> None:
    """Products by tiles on a processor without them: the process survives its SIGILL."""
    tiles = LEVELS[0]
    missing = tiles.flags - cpu_flags()
    is_whole = all(flag.startswith("amx_") for flag in missing) and {"amx_tile"} <= missing
    if not is_whole or not tiles.path.is_file():
        pytest.skip("this machine has AMX, or less than AVX512 besides, or a compiler that does not know it")
    monkeypatch.setattr(choice, "supported_levels", lambda: (tiles, *BUILT))
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    found = self_check.load_library()
    assert found is not None and found.level == BUILT[0]
    assert lines.getvalue().count("the processor refuses its instructions") == 1


def test_a_file_that_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: io.StringIO
) -> None:
    monkeypatch.setattr(levels, "LIBRARIES", tmp_path)
    torn = replace(BUILT[0], name="torn")
    torn.path.write_bytes(b"\x7fELF")
    monkeypatch.setattr(choice, "supported_levels", lambda: (torn,))
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert self_check.load_library() is None
    assert "it cannot be loaded" in lines.getvalue()
