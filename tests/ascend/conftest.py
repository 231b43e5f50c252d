"""Tests of the Ascend path. They are collected where torch_npu is installed, and then need the simulation.

Whole steps run twice: with work done when it is launched, and in the lazy mode, where it is done when the
program waits for it.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest

STEPS = ("test_exact", "test_copies", "test_graphs", "test_sampling")

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
elif "SIM_CANN_LIBRARIES" not in os.environ:
    raise pytest.UsageError("run these with ./dev test-ascend, or under python -m tests.ascend.simulate")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests of whole steps in both modes."""
    if metafunc.module.__name__.rpartition(".")[2] in STEPS:
        metafunc.parametrize("launches", ["at once", "late"], indirect=True)


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """The mode in which work is done: at once, or late."""
    if getattr(request, "param", "at once") == "at once":
        yield
        return
    import torch_npu

    assert torch_npu  # the simulation comes with it
    from tests.ascend.emulate import queue

    with queue.lazily():
        yield
