"""Ranks on the null device: start, steps, backpressure, deaths, and that nothing is left in any case."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from runtime.actors import ranks as ranks_module
from runtime.actors.child_environment import environment
from runtime.actors.ranks import Ranks
from runtime.errors import RankDied, RingError, StartError
from runtime.messages.ranks import LoadProgress, StartRank
from runtime.messages.steps import StepResult
from tests.devices.drive import start_rank
from tests.devices.plans import decodes, start_null

pytestmark = pytest.mark.anyio
PATIENCE_S = 30.0  # only a failing test waits for so long


def open_fds() -> dict[str, str]:
    """What each descriptor of this process is."""
    folder = "/proc/self/fd"
    return {
        name: os.readlink(f"{folder}/{name}")
        for name in os.listdir(folder)
        if os.path.lexists(f"{folder}/{name}")
    }


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = open_fds()
    yield
    # what an earlier test has left may be closed meanwhile
    assert open_fds().items() <= before.items()


class Run:
    """Ranks that were started, and what they woke us for."""

    def __init__(self, start: StartRank, **options: Any) -> None:
        self.ranks = Ranks(start, **options)
        self.num_wakes = 0
        self.woken = asyncio.Event()
        self.ranks.set_wake(self.wake)

    def wake(self) -> None:
        self.num_wakes += 1
        self.woken.set()

    async def results(self, count: int) -> list[StepResult]:
        results = self.ranks.results()
        with anyio.fail_after(PATIENCE_S):
            while len(results) < count:
                await self.woken.wait()
                self.woken.clear()
                results += self.ranks.results()
        return results

    async def death(self) -> RankDied:
        with anyio.fail_after(PATIENCE_S):
            while self.ranks.died is None:
                await self.woken.wait()
                self.woken.clear()
        return self.ranks.died


@asynccontextmanager
async def running(start: StartRank, **options: Any) -> AsyncIterator[Run]:
    run = Run(start, **options)
    with anyio.fail_after(PATIENCE_S):
        await run.ranks.start(lambda progress: None)
    try:
        yield run
    finally:
        await run.ranks.stop()


def is_gone(pid: int) -> bool:
    """Ended and reaped: no process, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


async def test_steps_come_back_in_order_from_rank_0_alone() -> None:
    progress: list[LoadProgress] = []
    run = Run(start_null(tp_size=2, first_token=10, num_tokens=5))
    ready = await run.ranks.start(progress.append)
    assert [r.rank for r in ready] == [0, 1]
    for rank in (0, 1):
        assert [p.phase for p in progress if p.rank == rank] == ["process", "device", "ready"]
    for step in range(5):
        assert run.ranks.submit(decodes(step))
    results = await run.results(5)
    assert [(r.step, r.token_ids.tolist()) for r in results] == [(n, [10 + (n + 1) % 5]) for n in range(5)]
    assert run.ranks.results() == [] and run.ranks.died is None
    await run.ranks.stop()


async def test_results_outlive_the_ring() -> None:
    async with running(start_null(), ring_bytes=1024) as run:
        kept: list[StepResult] = []
        for step in range(100):
            assert run.ranks.submit(decodes(step))
            kept += await run.results(1)
    assert [int(r.token_ids[0]) for r in kept] == [97 + (n + 1) % 26 for n in range(100)]


async def test_a_full_ring_refuses_and_loses_nothing() -> None:
    async with running(start_null(), ring_bytes=1024) as run:
        os.kill(run.ranks.pids[0], signal.SIGSTOP)
        accepted = 0
        while run.ranks.submit(decodes(accepted)):
            accepted += 1
        assert not run.ranks.submit(decodes(accepted))
        os.kill(run.ranks.pids[0], signal.SIGCONT)
        assert [r.step for r in await run.results(accepted)] == list(range(accepted))
        assert run.ranks.submit(decodes(accepted)), "a wake with results comes with room"
        await run.results(1)


async def test_a_plan_longer_than_the_ring_arrives() -> None:
    async with running(start_null(tp_size=2), ring_bytes=1024) as run:
        assert run.ranks.submit(decodes(0, padding=10_000))
        assert [r.step for r in await run.results(1)] == [0]
        with anyio.fail_after(30):
            # rank 0 has answered; rank 1 may still be reading the first plan
            while not run.ranks.submit(decodes(1)):
                await anyio.sleep(0)
        assert [r.step for r in await run.results(1)] == [1]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("tp_size", [1, 2])
async def test_stop_leaves_no_descriptor_and_no_process(tp_size: int) -> None:
    run = Run(start_null(tp_size=tp_size))
    await run.ranks.start(lambda progress: None)
    pids = run.ranks.pids
    assert run.ranks.submit(decodes(0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.ranks.stop)
        tasks.start_soon(run.ranks.stop)
    await run.ranks.stop()
    assert len(pids) == tp_size and all(map(is_gone, pids)) and run.ranks.died is None


@pytest.mark.usefixtures("nothing_left")
async def test_stop_before_start_is_nothing() -> None:
    await Ranks(start_null()).stop()


@pytest.mark.usefixtures("nothing_left")
async def test_a_rank_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "STOP_S", 0.0)
    monkeypatch.setattr(ranks_module, "TERM_S", 0.0)
    run = Run(start_null())
    await run.ranks.start(lambda progress: None)
    pids = run.ranks.pids
    os.kill(pids[0], signal.SIGSTOP)  # a stopped process handles no SIGTERM
    await run.ranks.stop()
    assert all(map(is_gone, pids))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "start,message",
    [
        (start_rank("", device="abacus"), "--device abacus is unknown"),
        (start_null(tp_size=2, step_ms=3), "step_ms"),
    ],
)
async def test_a_start_error_is_raised_and_all_ranks_end(start: StartRank, message: str) -> None:
    run = Run(start)
    with pytest.raises(StartError, match=message):
        await run.ranks.start(lambda progress: None)
    assert all(map(is_gone, run.ranks.pids)) and run.ranks.died is None and run.num_wakes == 0


@pytest.mark.usefixtures("nothing_left")
async def test_a_rank_killed_while_it_starts_is_raised() -> None:
    run = Run(start_null(tp_size=2))

    async def kill() -> None:
        while not run.ranks.pids:
            await anyio.lowlevel.checkpoint()
        os.kill(run.ranks.pids[1], signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        with pytest.raises(RankDied) as caught:
            await run.ranks.start(lambda progress: None)
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
    assert all(map(is_gone, run.ranks.pids)) and run.ranks.died is None and run.num_wakes == 0


@pytest.mark.usefixtures("nothing_left")
async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    run = Run(start_null(tp_size=2))
    with anyio.CancelScope() as scope:
        await run.ranks.start(lambda progress: scope.cancel())
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    await run.ranks.stop()
    assert all(map(is_gone, run.ranks.pids))


@pytest.mark.usefixtures("nothing_left")
async def test_no_descriptors_left_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(StartError, match="Too many open files; look at the limits"):
        await Ranks(start_null()).start(lambda progress: None)


@pytest.mark.usefixtures("nothing_left")
async def test_a_killed_rank_is_reported_once_and_stops_plans() -> None:
    async with running(start_null(tp_size=2)) as run:
        assert run.ranks.submit(decodes(0))
        await run.results(1)
        wakes = run.num_wakes
        os.kill(run.ranks.pids[1], signal.SIGKILL)
        died = await run.death()
        assert (died.rank, died.exit_code) == (1, -signal.SIGKILL)
        os.kill(run.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankDied):
            run.ranks.submit(decodes(1))
    assert run.ranks.died is died and run.num_wakes == wakes + 1


@pytest.mark.usefixtures("nothing_left")
async def test_an_exception_in_a_step_comes_after_the_results_before_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with running(start_null(fail_at_step=3)) as run:
        for step in range(5):
            assert run.ranks.submit(decodes(step))
        died = await run.death()
        assert [r.step for r in run.ranks.results()] == [0, 1, 2]
    assert died.exit_code == 1 and "RuntimeError while running a step" in str(died)
    assert "asked to fail at step 3" in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_left")
async def test_ranks_that_hang_say_where_and_end(capfd: pytest.CaptureFixture[str]) -> None:
    async with running(start_null(tp_size=2, poison_token=97, poison="hang")) as run:
        assert run.ranks.submit(decodes(1))
        await run.ranks.abandon("it hangs")
        died = await run.death()
        assert died.reason == "it hangs" and died.exit_code in (-signal.SIGUSR1, -signal.SIGKILL)
    assert "ranks/worker.py" in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_left")
async def test_ranks_that_cannot_say_anything_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "DUMP_S", 0.0)
    async with running(start_null()) as run:
        os.kill(run.ranks.pids[0], signal.SIGSTOP)
        await run.ranks.abandon("it hangs")
        died = await run.death()
    assert (died.exit_code, died.reason) == (-signal.SIGKILL, "it hangs")


@pytest.mark.usefixtures("nothing_left")
async def test_a_broken_ring_ends_its_rank() -> None:
    async with running(start_null()) as run:
        rank = run.ranks._ranks[0]
        os.eventfd_write(rank.reader.fileno(), 1)  # a count without a record
        died = await run.death()
    assert died.exit_code == -signal.SIGKILL and "generation" in str(died)


async def test_credit_that_was_never_given_ends_the_ranks() -> None:
    async with running(start_null()) as run:
        os.eventfd_write(run.ranks._plans._wakes[0].credit, 1 << 20)
        assert "gave back more" in str(await run.death())


async def test_a_plan_that_cannot_be_sent_harms_no_rank() -> None:
    async with running(start_null()) as run:
        plan = decodes(0)
        with pytest.raises(RingError):
            run.ranks.submit(structs.replace(plan, shown=plan.slots.astype(complex)))
        assert run.ranks.submit(plan)
        await run.results(1)


def test_plain_asyncio_in_a_thread_is_enough() -> None:
    steps: list[int] = []

    async def use() -> None:
        async with running(start_null()) as run:
            run.ranks.submit(decodes(8))
            steps.extend(result.step for result in await run.results(1))

    thread = threading.Thread(target=asyncio.run, args=(use(),))
    thread.start()
    thread.join(PATIENCE_S)
    assert steps == [8]


async def test_the_ranks_meet_in_a_file_without_a_name() -> None:
    async with running(start_null(tp_size=2)) as run:
        for pid in run.ranks.pids:
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            assert "/memfd:rendezvous (deleted)" in links


async def test_two_generations_live_side_by_side() -> None:
    async with running(start_null(), generation=1) as old, running(start_null(), generation=2) as new:
        os.kill(old.ranks.pids[0], signal.SIGKILL)
        await old.death()
        assert new.ranks.submit(decodes(1)) and [r.step for r in await new.results(1)] == [1]
        assert new.ranks.died is None


def test_the_number_of_threads_and_the_package_reach_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os,
        "environ",
        {
            "OMP_NUM_THREADS": "9",
            "GLOO_SOCKET_IFNAME": "eth7",
            "PYTHONPATH": "/first",
            "LANG": "C",
            "NCCL_NVLS_ENABLE": "2",
        },
    )
    given = environment(3)
    assert (
        given["OMP_NUM_THREADS"],
        given["MKL_NUM_THREADS"],
        given["GLOO_SOCKET_IFNAME"],
        given["LANG"],
    ) == ("3", "3", "eth7", "C")
    assert given["PYTHONPATH"].split(os.pathsep)[0] == "/first"
    assert (given["NCCL_GRAPH_REGISTER"], given["NCCL_NVLS_ENABLE"]) == ("0", "2")
    assert given["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "unless the operator says otherwise"
    given = environment(None)
    assert given["OMP_NUM_THREADS"] == "9", "None: the device decides"


PARENT = """
import asyncio
from runtime.actors.child_environment import environment
from runtime.actors.ranks import Ranks
from tests.devices.plans import start_null

async def main():
    ranks = Ranks(start_null(tp_size=2))
    await ranks.start(lambda progress: None)
    print(*ranks.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        for pid in (parent.pid, *pids):
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
        parent.kill()
    ended = select.poll()
    for pidfd in pidfds:
        ended.register(pidfd, select.POLLIN)
    left = set(pidfds)
    while left:
        events = ended.poll(PATIENCE_S * 1000)
        assert events, "a rank lives on without its parent"
        for pidfd, _ in events:
            ended.unregister(pidfd)
            left.discard(pidfd)
    for pidfd in pidfds:
        os.close(pidfd)
