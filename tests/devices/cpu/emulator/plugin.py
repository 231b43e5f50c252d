"""A plugin of pytest: the level of EMULATED_LEVEL, from EMULATED_FOLDER, is the only one of this machine.
With EMULATED_COMMAND its functions are called in an emulator."""

import os
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runtime.devices.cpu.kernels import build, levels

LEVEL = next(level for level in levels.LEVELS if level.name == os.environ["EMULATED_LEVEL"])
COMMAND = shlex.split(os.environ["EMULATED_COMMAND"])


def only_level(*_: object) -> tuple[levels.Level, ...]:
    """In place of levels.supported_levels."""
    return (LEVEL,)


def build_nothing() -> list[levels.Level]:
    """In place of build.build: who starts pytest with this plugin has built the level."""
    return []


levels.LIBRARIES = Path(os.environ["EMULATED_FOLDER"])
levels.supported_levels = only_level
build.build = build_nothing  # type: ignore[assignment]

from runtime.devices.cpu.kernels import library  # noqa: E402 (it takes names of levels when it is imported)


@pytest.fixture(scope="session", autouse=True)
def emulated_kernels() -> Iterator[None]:
    """Library loads its level in one emulator for all tests."""
    if not COMMAND:
        yield
        return
    from tests.devices.cpu.emulator.emulated import EmulatedFunctions  # only where there is an arena

    with closing(EmulatedFunctions(COMMAND, LEVEL.path)) as functions, pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load_functions", lambda _: functions)
        yield
