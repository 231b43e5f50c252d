"""Standby ranks: used by the next generation, replaced, killed at any moment, and gone with the server."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import runtime.actors.standby
from runtime import Engine
from runtime.actors.ranks import Ranks
from runtime.actors.standby import StandbyRanks
from tests.actors.test_supervisor import NULL, answer, kill
from tests.metrics.read import sample

pytestmark = pytest.mark.anyio
OPTIONS: dict[str, Any] = {**NULL, "standby_ranks": 1}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets are started without a delay."""
    monkeypatch.setattr(runtime.actors.standby, "DELAY_S", 0.001)


def standby_of(engine: Engine) -> StandbyRanks:
    return engine._core.replicas[0].supervisor.standby


def ranks_of(engine: Engine) -> Ranks:
    return engine._core.replicas[0].supervisor.ranks


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not is_so():
            await anyio.sleep(0.005)


async def recovered(engine: Engine, generation: int) -> None:
    """Waits for this generation of ranks, or a later one. It may come faster than anyone sees its start."""
    await until(lambda: ranks_of(engine).generation >= generation and engine._core.health().state == "ready")


def names(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]


@pytest.mark.parametrize("tp_size, count", [(1, 1), (2, 1), (1, 2)])
async def test_the_next_generation_is_a_standby_set_and_another_takes_its_place(
    tp_size: int, count: int
) -> None:
    async with Engine(**NULL, tensor_parallel_size=tp_size, standby_ranks=count) as engine:
        for generation in (2, 3):
            await until(lambda: standby_of(engine).num_ready == count)
            waiting = standby_of(engine).pids
            assert names(waiting) == [f"standby-{rank}" for rank in range(tp_size)] * count
            assert sample(engine.metrics(), "runtime_standby_ranks") == count
            assert b'runtime_resident_bytes{process="standby0"}' in engine.metrics()
            kill(engine)
            await recovered(engine, generation)
            assert ranks_of(engine).pids == waiting[:tp_size]  # the oldest
            assert names(ranks_of(engine).pids) == [f"rank-{rank}" for rank in range(tp_size)]
            assert engine._core.server_info()["generation"] == generation
            got = (await engine.generate([1, 2], seed=3, max_new_tokens=9, ignore_eos=True)).token_ids
            assert got == answer([1, 2], 3, 9)
        pids = ranks_of(engine).pids + standby_of(engine).pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_standby_ranks_that_are_killed_are_replaced_and_harm_no_request() -> None:
    async with Engine(**OPTIONS, null_step_s=0.001) as engine:
        got: list[int] = []
        dead: set[int] = set()
        async for delta in engine.stream([1, 2], seed=3, max_new_tokens=200, ignore_eos=True):
            got += delta.token_ids
            for pid in standby_of(engine).pids:  # at every moment of their lives
                with suppress(ProcessLookupError):  # it has gone by itself, killed before
                    os.kill(pid, signal.SIGKILL)
                dead.add(pid)
        assert got == answer([1, 2], 3, 200) and dead
        assert engine._core.server_info()["generation"] == 1
        await until(lambda: standby_of(engine).num_ready == 1)


async def test_a_standby_that_is_killed_with_the_rank_is_not_missed() -> None:
    """Whether the loop has seen its death or not."""
    async with Engine(**OPTIONS) as engine:
        await until(lambda: standby_of(engine).num_ready == 1)
        for pid in (*standby_of(engine).pids, *ranks_of(engine).pids):
            os.kill(pid, signal.SIGKILL)
        await recovered(engine, 2)
        got = (await engine.generate([7], seed=0, max_new_tokens=5, ignore_eos=True)).token_ids
        assert got == answer([7], 0, 5)


async def test_a_standby_that_cannot_import_ends_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.actors.standby, "MAX_DELAY_S", 0.002)
    pids: set[int] = set()
    async with Engine(**OPTIONS) as engine:
        supervisor = engine._core.replicas[0].supervisor
        monkeypatch.setattr(
            supervisor,
            "setup",
            runtime.actors.supervisor.structs.replace(supervisor.setup, device="no such device"),
        )
        with anyio.fail_after(30):
            while len(pids) < 3:
                pids |= set(standby_of(engine).pids)
                await anyio.sleep(0.005)
        assert standby_of(engine).num_ready <= 1  # one may have been complete before
        assert engine._core.health().state == "ready"


async def test_a_set_that_is_not_complete_is_not_used() -> None:
    async with Engine(**OPTIONS) as engine:
        await until(lambda: standby_of(engine).num_ready == 1)
        (pid,) = standby_of(engine).pids
        standby_of(engine)._sets[0]._ranks[0].is_standing_by = False
        kill(engine)
        await recovered(engine, 2)
        assert ranks_of(engine).pids != [pid] and standby_of(engine).pids == [pid]
