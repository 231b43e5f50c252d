"""Fixtures of tests/conftest.py: for which tests the simulated NPU's limits are lifted, those marked
`lenient`. In all others it refuses what documents and tiling code refuse, in this process and in ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.ascend.emulate.table import Limits


@contextmanager
def _limits(node: pytest.Module | pytest.Item) -> Iterator[None]:
    is_lenient = node.get_closest_marker("lenient") is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Limits, "strict", not is_lenient)
        patch.setenv("SIM_NPU_STRICT", str(int(not is_lenient)))
        yield


@pytest.fixture(autouse=True, scope="module")
def limits_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of what the tests of a module share."""
    with _limits(request.node):
        yield


@pytest.fixture(autouse=True)
def limits_of_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of a test."""
    with _limits(request.node):
        yield
