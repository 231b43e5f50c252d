"""Generations of ranks on the null device, through the library: what clients see when ranks are killed,
fail and hang."""

import io
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import pytest

import runtime.actors.death_reports
import runtime.actors.deaths
import runtime.actors.supervisor
from runtime import Engine, log
from runtime.actors.deaths import MAX_IN_VAIN, Deaths, pause_s
from runtime.actors.watchdog import Watchdog
from runtime.devices.cgroup import MemoryLimit
from runtime.errors import InternalFault, RankDied, SpawnError, StartError, Unavailable
from runtime.service import State
from tests.metrics.read import sample

NULL: dict[str, Any] = {"device": "null", "max_total_tokens": 8192}
POISON = 50  # in no answer of the null device, which are of a..z, and in one prompt


def answer(prompt: list[int], seed: int, count: int) -> list[int]:
    """What the null device says."""
    return [97 + (seed + len(prompt) + i) % 26 for i in range(count)]


def kill(engine: Engine, rank: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(engine._core.replicas[0].supervisor.ranks.pids[rank], number)


async def settled(engine: Engine, state: State = "ready") -> None:
    with anyio.fail_after(30):
        while engine._core.health().state != state:
            await anyio.sleep(0.005)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"disable_overlap_schedule": True, "page_size": 4},
        {"chunked_prefill_size": 16, "max_running_requests": 5},
    ],
    ids=str,
)
async def test_kills_at_random_moments_change_no_token(options: dict[str, Any]) -> None:
    random = Random(str(options))
    async with Engine(**NULL, null_step_s=0.001, **options) as engine:
        answers: dict[int, list[int]] = {i: [] for i in range(12)}
        # tokens after which a rank is killed
        kills = [random.randrange(100 * k + 40, 100 * k + 90) for k in range(5)]

        async def client(i: int) -> None:
            async for delta in engine.stream([i] * (10 + i), seed=i, max_new_tokens=50, ignore_eos=True):
                answers[i] += delta.token_ids
                if (
                    kills
                    and sum(map(len, answers.values())) >= kills[0]
                    and engine._core.health().state == "ready"
                ):
                    # it may have been killed before, which is not known yet
                    with suppress(ProcessLookupError):
                        kill(engine, random.randrange(len(engine._core.replicas[0].supervisor.ranks.pids)))
                        kills.pop(0)

        async with anyio.create_task_group() as tasks:
            for i in answers:
                tasks.start_soon(client, i)
        await settled(engine)
        assert answers == {i: answer([i] * (10 + i), i, 50) for i in answers}
        metrics = engine.metrics()
        # two kills of which the second came before the first was noticed are one restart
        assert 3 <= sample(metrics, "runtime_rank_restarts_total") <= 5 - len(kills)
        assert (
            sample(metrics, "runtime_recovered_requests_total") >= 3
            and sample(metrics, "runtime_failed_requests_total") == 0
        )
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages


@pytest.mark.anyio
@pytest.mark.parametrize("how, count", [("raise", 9), ("kill", 5), ("hang", 2)])
async def test_a_poisoned_request_fails_alone(
    how: str, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Engine(
        **NULL, null_poison_token=POISON, null_poison=how, null_step_s=0.001, watchdog_timeout=1
    ) as engine:
        answers: dict[int, list[int]] = {}
        failures: dict[int, str] = {}

        async def client(i: int) -> None:
            prompt = [1, 2, POISON if i == 1 else 3, i]
            try:
                answers[i] = (
                    await engine.generate(prompt, seed=i, max_new_tokens=60, ignore_eos=True)
                ).token_ids
            except InternalFault as error:
                failures[i] = error.message

        async with anyio.create_task_group() as tasks:
            for i in range(count):
                tasks.start_soon(client, i)
        await settled(engine)
        assert failures.keys() == {1} and "each time it computed this request" in failures[1]
        assert answers == {i: answer([1, 2, 3, i], i, 60) for i in range(count) if i != 1}
        assert sample(engine.metrics(), "runtime_failed_requests_total") == 1
        assert (await engine.generate([5], seed=0, max_new_tokens=3, ignore_eos=True)).token_ids == answer(
            [5], 0, 3
        )
    output = capfd.readouterr().err
    assert {"raise": "asked to fail at this token", "kill": "", "hang": "in _poison"}[how] in output, (
        "the stack is in the log"
    )


@pytest.mark.anyio
async def test_poison_in_an_answer_is_found_too() -> None:
    async with Engine(**NULL, null_poison_token=ord("z"), null_poison="kill") as engine:
        one = (await engine.generate([1], seed=0, max_new_tokens=24, ignore_eos=True)).token_ids
        assert one == answer([1], 0, 24) and one[-1] == ord("y")
        with pytest.raises(InternalFault):
            await engine.generate([1], seed=0, max_new_tokens=40, ignore_eos=True)


@pytest.mark.anyio
async def test_health_and_requests_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine(**NULL, null_step_s=0.001) as engine:
        stream = engine.stream([1, 2], seed=3, max_new_tokens=50, ignore_eos=True)
        got = (await anext(stream)).token_ids
        kill(engine)
        await settled(engine, "recovering")
        load = engine.load()
        assert (load.running, load.waiting, load.used_pages) == (0, 1, 0)
        answers: list[list[int]] = []

        async def late() -> None:
            answers.append((await engine.generate([9], seed=1, max_new_tokens=5, ignore_eos=True)).token_ids)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late)
            async for delta in stream:
                got += delta.token_ids
        assert got == answer([1, 2], 3, 50) and answers == [answer([9], 1, 5)]
        assert engine._core.server_info()["generation"] == 2 and engine._core.health().state == "ready"


@pytest.mark.anyio
async def test_ranks_that_crash_without_a_cause_are_a_failure_of_the_server() -> None:
    """SIGSEGV is what a rank does to itself."""
    async with Engine(**NULL) as engine:
        for _ in range(MAX_IN_VAIN - 1):
            kill(engine, number=signal.SIGSEGV)
            await settled(engine, "recovering")
            await settled(engine)
        await engine.generate([1], max_new_tokens=2)  # steps were done: it counts from the beginning
        for _ in range(MAX_IN_VAIN - 1):
            kill(engine, number=signal.SIGSEGV)
            await settled(engine, "recovering")
            await settled(engine)
        kill(engine, number=signal.SIGSEGV)
        await settled(engine, "failed")
        assert isinstance(engine._core.failure, RankDied)
        with pytest.raises(Unavailable):
            await engine.generate([1])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error, attempts",
    [(RankDied(0, 1), MAX_IN_VAIN), (RankDied(0, -11), MAX_IN_VAIN), (StartError("no memory"), 1)],
    ids=["fails", "crashes", "cannot start"],
)
async def test_ranks_that_do_not_get_ready_again(
    error: Exception, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Broken(runtime.actors.supervisor.Ranks):
        async def start(self, on_progress: Any, setup: Any = None) -> Any:
            started.append(self.generation)
            raise error

    async with Engine(**NULL, null_step_s=0.001) as engine:
        stream = engine.stream([1], max_new_tokens=2000, ignore_eos=True)
        await anext(stream)
        monkeypatch.setattr(runtime.actors.supervisor, "Ranks", Broken)
        kill(engine)
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
        assert engine._core.failure is error and started == [2, 3, 4][:attempts]


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged from here on."""
    stream = io.StringIO()
    log.setup("debug", stream=stream)
    yield stream
    log.silence()


class Killed(runtime.actors.supervisor.Ranks):
    """Ranks of which the first ones are killed while they start, or cannot be spawned."""

    errors: ClassVar[list[Exception]] = []

    async def start(self, on_progress: Any, setup: Any = None) -> Any:
        if self.errors:
            await self.stop()
            raise self.errors.pop(0)
        return await super().start(on_progress, setup)


@pytest.mark.anyio
@pytest.mark.parametrize("was_ready", [False, True], ids=["first start", "recovery"])
async def test_kills_while_ranks_start_are_no_failure_of_the_model(
    was_ready: bool, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
) -> None:
    kills: list[Exception] = [RankDied(0, -signal.SIGKILL) for _ in range(MAX_IN_VAIN + 2)]
    monkeypatch.setattr(runtime.actors.deaths, "MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(runtime.actors.supervisor, "Ranks", Killed)
    monkeypatch.setattr(Killed, "errors", [] if was_ready else kills)
    async with Engine(**NULL) as engine:
        if was_ready:
            monkeypatch.setattr(Killed, "errors", [*kills, SpawnError("no process")])
            kill(engine)
            await settled(engine, "recovering")
            await settled(engine)
        assert not Killed.errors
        assert (await engine.generate([5], seed=0, max_new_tokens=3, ignore_eos=True)).token_ids == answer(
            [5], 0, 3
        )
    output = logged.getvalue()
    assert "killed from outside (SIGKILL)" in output and "started again after a pause" in output
    assert ("no ranks can be started now" in output) == was_ready


@pytest.mark.anyio
@pytest.mark.parametrize("was_ready", [False, True], ids=["first start", "recovery"])
async def test_want_of_memory_is_a_failure_only_if_there_never_was_enough(
    was_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count() if not was_ready else itertools.chain([0, 0], itertools.count())
    monkeypatch.setattr(runtime.actors.death_reports, "num_oom_kills", lambda: next(count))
    monkeypatch.setattr(
        runtime.actors.death_reports, "memory_limit", lambda: MemoryLimit("memory.max", 512 << 20, 512 << 20)
    )
    monkeypatch.setattr(runtime.actors.deaths, "MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(runtime.actors.supervisor, "Ranks", Killed)
    kills: list[Exception] = [RankDied(0, -signal.SIGKILL) for _ in range(MAX_IN_VAIN)]
    monkeypatch.setattr(Killed, "errors", [] if was_ready else kills)
    if was_ready:
        async with Engine(**NULL) as engine:
            monkeypatch.setattr(Killed, "errors", kills)
            kill(engine)
            await settled(engine, "recovering")
            await settled(engine)
            assert not Killed.errors
    else:
        with pytest.raises(RankDied, match=r"limit of 512 MiB \(memory.max\) is used up"):
            async with Engine(**NULL):
                pass


@pytest.mark.parametrize(
    "exit_code, reason, is_kill",
    [
        (-9, "", True),
        (-15, "", True),
        (-9, "no step was done in 300 s", False),  # killed by the watchdog
        (-11, "", False),
        (-6, "", False),
        (1, "", False),
        (0, "", False),
        (None, "", False),
    ],
)
def test_which_deaths_are_kills(exit_code: int | None, reason: str, is_kill: bool) -> None:
    assert RankDied(0, exit_code, reason).is_kill == is_kill


def test_deaths_are_final_by_failures_alone_and_pauses_grow_by_kills() -> None:
    deaths = Deaths()
    for _ in range(100):
        deaths.add(RankDied(0, -9))
    assert not deaths.are_final and deaths.pause_s == 30.0
    deaths.clear()
    assert deaths.pause_s == 0
    for _ in range(MAX_IN_VAIN):
        assert not deaths.are_final
        deaths.add(RankDied(0, 1))
    assert deaths.are_final and deaths.pause_s == 0
    pauses = [pause_s(count) for count in range(12)]
    assert pauses[:4] == [0, 0, 0.25, 0.5] and pauses == sorted(pauses) and max(pauses) == 30


@pytest.mark.anyio
async def test_the_soft_watchdog_reports_where_a_slow_step_is_and_kills_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of one rank: two would write their stacks into each other."""
    async with Engine(**NULL, null_step_s=1.0, soft_watchdog_timeout=0.2) as engine:
        got = (await engine.generate([1, 2], seed=3, max_new_tokens=2, ignore_eos=True)).token_ids
        assert got == answer([1, 2], 3, 2) and engine._core.replicas[0].supervisor.generation == 1
        assert sample(engine.metrics(), "runtime_rank_restarts_total") == 0
    output = capfd.readouterr().err
    assert "null/device.py" in output and "in result" in output


def test_the_watchdog_bites_only_when_a_step_hangs() -> None:
    watchdog = Watchdog(10)
    looks = [  # seconds, latest step done, steps in flight, stuck?
        (0, 0, 0, False),
        (100, 0, 0, False),
        (101, 0, 1, False),
        (109, 0, 2, False),
        (110, 0, 2, True),
        (111, 1, 2, False),
        (120, 1, 1, False),
        (121, 1, 1, True),
        (121, 1, 0, False),
        (130, 1, 1, False),
        (131, 1, 1, True),
    ]
    for now, last, in_flight, is_stuck in looks:
        scheduler: Any = SimpleNamespace(last_step=last, num_in_flight=in_flight)
        assert watchdog.is_stuck(now, scheduler) == is_stuck, now
