"""The process that imports torch while options are read: it becomes rank 0, or ends."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from msgspec import structs

from runtime.actors.child_environment import environment
from runtime.actors.early_process import EarlyProcess, open_early_process
from runtime.actors.fork_server import ForkServer
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.ranks import Ranks
from runtime.devices.cores import threads_of_rank
from runtime.messages.ranks import ProcessSetup
from tests.actors.test_ranks import PATIENCE_S, is_gone, nothing_left
from tests.devices.plans import decodes, start_null

pytestmark = pytest.mark.anyio
__all__ = ["nothing_left"]


@pytest.fixture
async def loop() -> None:
    """An event loop: the first one of a process opens descriptors that stay."""


def processes_of(early: EarlyProcess, num_ranks: int = 1, forks: ForkServer | None = None) -> RankProcesses:
    setup = ProcessSetup(device="null", num_ranks=num_ranks, num_threads=1)
    return RankProcesses(setup, 1, imports=True, early=early, forks=forks)


async def check_serving(processes: RankProcesses, num_ranks: int = 1) -> None:
    """Ranks of these processes start, compute a step and end."""
    ranks = Ranks(start_null(tp_size=num_ranks), processes=processes)
    with anyio.fail_after(PATIENCE_S):
        await ranks.start(lambda progress: None)
        assert ranks.submit(decodes(0))
        while not (results := ranks.results()):
            await anyio.sleep(0.005)
    assert [result.step for result in results] == [0]
    await ranks.stop()


@pytest.mark.usefixtures("loop", "nothing_left")
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_it_becomes_rank_0_with_the_limits_of_its_parent(num_ranks: int) -> None:
    early = EarlyProcess("null", environment(1))
    processes = processes_of(early, num_ranks)
    early.close()  # it was taken
    pids = [rank.process.pid for rank in processes.ranks]
    assert pids[0] == early.pid and pids[-1] != early.pid or num_ranks == 1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert all(resource.prlimit(pid, resource.RLIMIT_NOFILE) == limit for pid in pids)
    await check_serving(processes, num_ranks)
    assert all(map(is_gone, pids))


@pytest.mark.usefixtures("loop", "nothing_left")
async def test_it_makes_the_fork_server_of_its_generation() -> None:
    early, forks = EarlyProcess("null", environment(1)), ForkServer()
    processes = processes_of(early, forks=forks)
    early.close()
    with anyio.fail_after(PATIENCE_S):
        while not forks.pids:
            await anyio.sleep(0.005)
    assert processes.ranks[0].process.pid == early.pid
    await check_serving(processes)
    second = Ranks(structs.replace(start_null(), num_threads=1), generation=2, forks=forks)
    with anyio.fail_after(PATIENCE_S):
        await second.start(lambda progress: None)
    assert Path(f"/proc/{second.pids[0]}/cmdline").read_bytes().count(b"--early") == 1  # a fork of it
    await second.stop()
    forks.close()


@pytest.mark.usefixtures("loop", "nothing_left")
@pytest.mark.parametrize("case", ["environment", "device", "has ended"])
async def test_ranks_that_it_cannot_be_are_started_without_it(case: str) -> None:
    early = EarlyProcess("cpu" if case == "device" else "null", environment(1))
    if case == "environment":
        processes = RankProcesses(ProcessSetup(device="null", num_ranks=1, num_threads=2), 1, early=early)
    else:
        if case == "has ended":
            os.kill(early.pid, 9)
            os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
        processes = processes_of(early)
    early.close()
    assert is_gone(early.pid) and processes.ranks[0].process.pid != early.pid
    await check_serving(processes)


@pytest.mark.parametrize("words", [["--device", "null"], ["--device=cuda"], ["--nnodes", "2"]])
def test_ranks_of_other_devices_have_none(words: list[str]) -> None:
    assert open_early_process(words) is None


def test_a_machine_with_accelerators_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("runtime.actors.early_process.ACCELERATORS", (f"{tmp_path}/nvidia[0-9]*",))
    assert open_early_process([]) is None


SERVE = """
import subprocess, sys
from runtime.actors import early_process
from runtime.cli import main
start = early_process.EarlyProcess.__init__
def started(self, *given):
    start(self, *given)
    print(self.pid, flush=True)
early_process.EarlyProcess.__init__ = started
sys.exit(main(["serve", "--port", "none"]))
"""


def test_it_ends_with_a_command_line_that_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--port" in done.stderr
    if done.stdout:  # this machine has no accelerator
        assert is_gone(int(done.stdout))


def test_the_threads_of_a_rank_leave_a_core_to_the_loop_where_there_are_enough() -> None:
    assert [threads_of_rank(cores) for cores in (1, 2, 3, 8)] == [1, 2, 2, 7]
    assert [threads_of_rank(8, ranks) for ranks in (2, 4, 16)] == [3, 2, 1]
