"""What tests share: the event loop, ranks that start fast, Triton's interpreter where there is no GPU,
samples of big matrices."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import runtime.actors.standby
from runtime.actors import child_environment
from runtime.devices.cpu.kernels import build
from tests.launcher import Launchers
from tests.sample import sample

if "SIM_CANN_LIBRARIES" in os.environ:
    from tests.ascend.limits import limits_of_module as limits_of_module
    from tests.ascend.limits import limits_of_test as limits_of_test

# the suite has a process for each core; torch reads this when it is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # read when triton is first imported, by whichever library of a test comes first
    os.environ["TRITON_INTERPRET"] = "1"

# what forked ranks have imported -> the library that it needs
PRELOADED = {
    "runtime.ranks.torch_executor": "torch",
    "runtime.devices.cpu.device": "torch",
    "runtime.grammar.xgrammar": "xgrammar",
    "runtime.devices.ascend.ops": "torch_npu",
    "runtime.devices.ascend.moe": "torch_npu",
}


def values(case: pytest.Function) -> dict[str, str]:
    """The parameters of a case as texts, for one and the same value the same."""
    return {name: repr(value) for name, value in case.callspec.params.items()}


# no standby ranks in engines of tests that live shorter than this; tests of standby ranks change it
runtime.actors.standby.DELAY_S = 600.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all cases of the tests that are marked `sampled`")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles CPU kernels whose sources have changed, once for all processes of the suite."""
    if not hasattr(session.config, "workerinput") and build.find_compiler() is not None:
        build.build()


@pytest.hookimpl(trylast=True)  # after cases of devices that this run does not test have gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases that do not exist (`where`), and what a run takes with --full only: tests marked
    `full`, and most cases of big matrices (`sampled`). Tests that are named one by one always run."""
    cases = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    left_out: set[pytest.Item] = {
        case
        for case in cases
        if not all(m.kwargs["holds"](**case.callspec.params) for m in case.iter_markers("where"))
    }
    is_sampled = not config.getoption("--full") and not any("::" in argument for argument in config.args)
    if is_sampled:
        left_out |= {item for item in items if item.get_closest_marker("full") is not None}
    matrices: dict[tuple[str, object], list[pytest.Function]] = defaultdict(list)
    for case in cases:
        if is_sampled and case not in left_out and (marker := case.get_closest_marker("sampled")) is not None:
            matrices[case.nodeid.split("[")[0], case.callspec.params.get(marker.kwargs.get("by"))].append(
                case
            )
    for matrix in matrices.values():
        marker = matrix[0].get_closest_marker("sampled")
        assert marker is not None
        kept = sample([values(case) for case in matrix], marker.args[0])
        left_out |= {case for i, case in enumerate(matrix) if i not in kept}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Imports and test cases live to the end: a garbage collector that walks them again and again, while they
    are made, takes a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Sets aside what collection made: each full collection would walk it again, and what gives memory back
    asks for one."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def launchers() -> Iterator[Launchers]:
    """Forks ranks, see tests/launcher.py."""
    started = Launchers([module for module, needs in PRELOADED.items() if find_spec(needs) is not None])
    yield started
    started.close()


@pytest.fixture(scope="module")
def forked_children(launchers: Launchers) -> Iterator[None]:
    """Ranks and grammar compilers of a module's engines are forked rather than started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_environment, "start_module", launchers.start_module)
        yield


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}
