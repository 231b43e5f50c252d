"""What all tests share: the event loop, Triton's interpreter where there is no GPU, and samples of big matrices."""

import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.sample import sample

if not Path("/dev/nvidiactl").exists():
    # read when triton is first imported, by whichever library of a test comes first
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all cases of the tests that are marked `sampled`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases of sampled tests that this run does not take."""
    if config.getoption("--full") or any("::" in argument and "[" in argument for argument in config.args):
        return
    matrices: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") is not None:
            matrices[item.nodeid.split("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for cases in matrices.values():
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        kept = sample([_parameters(case) for case in cases], marker.args[0])
        left_out |= {case for i, case in enumerate(cases) if i not in kept}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _parameters(case: pytest.Function) -> dict[str, str]:
    """The parameters of a case by name, each as the text that tells its values apart."""
    return {name: repr(value) for name, value in case.callspec.indices.items()}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}
