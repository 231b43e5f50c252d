"""Ranks that are forked: the processes of later generations, what they inherit, and how all of it ends."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import runtime.actors.fork_server
import runtime.actors.standby
from runtime import Engine
from runtime.actors.fork_server import ForkedProcess, ForkServer, open_fork_server
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.ranks import Ranks
from runtime.errors import StartError
from runtime.messages.ranks import ProcessSetup
from runtime.ranks import forks as process_side
from runtime.ranks.worker import make_fork_server
from tests.actors.test_ranks import PATIENCE_S, is_gone, nothing_left
from tests.devices.plans import decodes, start_null

pytestmark = pytest.mark.anyio
__all__ = ["nothing_left"]
SETUP = ProcessSetup(device="null", num_ranks=1, num_threads=None)


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not is_so():
            await anyio.sleep(0.005)


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def started(forks: ForkServer, generation: int, tp_size: int = 1) -> Ranks:
    ranks = Ranks(start_null(tp_size=tp_size), generation=generation, forks=forks)
    with anyio.fail_after(PATIENCE_S):
        await ranks.start(lambda progress: None)
    return ranks


def is_fork(pid: int, server: int) -> bool:
    """Whether a process was forked rather than started: it has the command line of the fork server."""
    lines = [Path(f"/proc/{one}/cmdline").read_bytes() for one in (pid, server)]
    return lines[0] == lines[1]


async def test_waiting_for_a_process_that_goes_on_has_a_limit() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = ForkedProcess(child.pid)
    with pytest.raises(TimeoutError, match="has not ended in 0.01 s"):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE_S) == child.wait() or process.returncode == -signal.SIGKILL
    assert ForkedProcess(child.pid).poll() == 0  # waited for by something else


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("tp_size", [1, 2])
async def test_the_first_rank_makes_it_and_later_generations_are_its_forks(tp_size: int) -> None:
    forks = ForkServer()
    first = await started(forks, 1, tp_size)
    await until(lambda: bool(forks.pids))
    (server,) = forks.pids
    await until(lambda: name(server) == "fork-server")
    second = await started(forks, 2, tp_size)
    assert [is_fork(pid, server) for pid in second.pids] == [True] * tp_size
    assert [name(pid) for pid in second.pids] == [f"rank-{rank}" for rank in range(tp_size)]
    for pid in (server, *second.pids):
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        assert int(status[1]) == os.getpid() and int(status[2]) == pid  # parent, process group
    await first.stop()  # the fork server outlives the rank that made it
    assert second.submit(decodes(0))
    with anyio.fail_after(PATIENCE_S):
        while not (results := second.results()):
            await anyio.sleep(0.005)
    assert [result.step for result in results] == [0]
    pids = second.pids
    await second.stop()
    assert forks.pids == [server] and all(map(is_gone, pids))
    forks.close()
    assert is_gone(server)


@pytest.mark.usefixtures("nothing_left")
async def test_a_fork_has_the_descriptors_of_its_rank_and_no_others() -> None:
    forks = ForkServer()
    first = await started(forks, 1)
    await until(lambda: bool(forks.pids))
    second = await started(forks, 2)
    (rank,), (server,) = second.pids, forks.pids

    def open_files(pid: int) -> list[str]:
        folder = Path(f"/proc/{pid}/fd")
        return sorted(os.readlink(one).split(":")[0] for one in folder.iterdir() if int(one.name) > 2)

    assert open_files(server) == ["socket"]
    assert open_files(rank) == [*["/memfd"] * 4, *["anon_inode"] * 4]  # two rings, mapped
    for ranks in (first, second):
        await ranks.stop()
    forks.close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("way", ["killed", "stopped", "other environment"])
async def test_without_a_fork_server_that_serves_ranks_are_started_by_exec(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = ForkServer()
    first = await started(forks, 1)
    await until(lambda: bool(forks.pids))
    (server,) = forks.pids
    if way == "other environment":
        monkeypatch.setenv("SOMETHING_ELSE", "1")
    else:
        monkeypatch.setattr(runtime.actors.fork_server, "ANSWER_S", 0.05)
        os.kill(server, signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    second = await started(forks, 2)
    assert first.is_serving and second.is_serving
    if way == "other environment":
        assert not is_fork(second.pids[0], server) and forks.pids == [server]
    else:
        assert is_gone(server)
        await until(lambda: bool(forks.pids))  # the second generation has made another
        assert forks.pids != [server]
    for ranks in (first, second):
        await ranks.stop()
    forks.close()


@pytest.mark.usefixtures("nothing_left")
def test_early_ranks_that_are_not_taken_end_with_their_fork_server() -> None:
    processes = RankProcesses(SETUP, 1, imports=True, forks=ForkServer())
    assert processes.forks is not None
    while not processes.forks.pids:
        os.sched_yield()
    pids = [*processes.forks.pids, processes.ranks[0].process.pid]
    processes.kill()
    assert all(map(is_gone, pids)) and processes.forks.pids == []


@pytest.mark.usefixtures("nothing_left")
async def test_exit_codes_and_signals_are_those_of_any_child() -> None:
    forks = ForkServer()
    first = await started(forks, 1)
    await until(lambda: bool(forks.pids))
    killed, refused = await started(forks, 2), Ranks(start_null(), generation=3, forks=forks)
    os.kill(killed.pids[0], signal.SIGKILL)
    await until(lambda: killed.died is not None)
    assert killed.died is not None and killed.died.is_kill and killed.died.exit_code == -signal.SIGKILL
    setup = msgspec.structs.replace(start_null(), device="abacus")
    with pytest.raises(StartError, match="abacus"), anyio.fail_after(PATIENCE_S):
        await refused.start(lambda progress: None, setup)
    process = killed._ranks[0].process
    assert isinstance(process, ForkedProcess)
    process.kill()  # does nothing to a process that has ended
    assert process.wait(0.0) == -signal.SIGKILL
    for ranks in (first, killed, refused):
        await ranks.stop()
    forks.close()


PARENT = """
import asyncio
from runtime.actors.fork_server import ForkServer
from runtime.actors.ranks import Ranks
from tests.devices.plans import start_null

async def main():
    forks = ForkServer()
    for generation in (1, 2):
        ranks = Ranks(start_null(), generation=generation, forks=forks)
        await ranks.start(lambda progress: None)
        while not forks.pids:
            await asyncio.sleep(0.005)
        print(*ranks.pids)
    print(*forks.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_all_of_them_end_with_a_parent_that_is_killed() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        pidfds = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(3)]
        parent.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_S)[0], "a process lives on without its parent"
        os.close(pidfd)


async def test_ranks_of_the_cpu_are_forked_and_share_what_they_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime.actors.standby, "DELAY_S", 0.001)
    options: dict[str, Any] = {"device": "cpu", "standby_ranks": 1, "dtype": "float32"}
    async with Engine(**options) as engine:
        supervisor = engine._core.replicas[0].supervisor
        assert supervisor.forks is not None
        expected = (await engine.generate([5, 6], temperature=0, max_new_tokens=8, ignore_eos=True)).token_ids
        await until(lambda: supervisor.standby.num_ready == 1)
        if not supervisor.forks.pids or not is_fork(supervisor.standby.pids[0], supervisor.forks.pids[0]):
            (waiting,) = supervisor.standby.pids  # was started before the fork server had come up
            os.kill(waiting, signal.SIGKILL)
            await until(lambda: supervisor.standby.num_ready == 1 and supervisor.standby.pids != [waiting])
        standby, server = supervisor.standby.pids[0], supervisor.forks.pids[0]
        assert is_fork(standby, server)
        own = [line for line in Path(f"/proc/{standby}/smaps_rollup").read_text().split("\n")]
        dirty = next(int(line.split()[1]) for line in own if line.startswith("Private_Dirty"))
        assert dirty < 40 << 10  # of some 150 MiB that importing torch makes
        os.kill(supervisor.ranks.pids[0], signal.SIGKILL)
        got = (await engine.generate([5, 6], temperature=0, max_new_tokens=8, ignore_eos=True)).token_ids
        assert supervisor.ranks.pids == [standby] and got == expected
        assert name(standby) == "rank-0"
        pids = [standby, server]
    assert all(map(is_gone, pids))


def test_there_is_one_only_where_it_is_of_use() -> None:
    assert open_fork_server("cpu", 1) is not None
    assert open_fork_server("cpu", 0) is None
    assert open_fork_server("null", 1) is None and open_fork_server("cuda", 1) is None


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_cannot_make_one_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.ranks.worker.may_fork", lambda: False)
    for device in ("null", "abacus"):
        reading, writing = os.pipe()
        assert make_fork_server(device, writing, os.getppid()) is None
        assert os.read(reading, 1) == b""  # closed
        os.close(reading)


def test_descriptors_change_places() -> None:
    fds = [os.open(f"/proc/self/{one}", os.O_RDONLY) for one in ("stat", "maps", "status")]
    wanted = [fds[1], fds[2], fds[0]]
    process_side.give_numbers(fds, wanted)
    links = [os.readlink(f"/proc/self/fd/{fd}").rsplit("/", 1)[1] for fd in wanted]
    assert links == ["stat", "maps", "status"]
    for fd in wanted:
        os.close(fd)
