"""kill -9 of a rank in every state that a rank can be in: the server goes on, requests get the answers of an
undisturbed server, and what operators asked for happens, or is refused and can be asked for again."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.actors.ranks import Ranks
from runtime.errors import Unavailable
from runtime.messages.lora import LoadAdapter
from runtime.messages.memory import ChangeMemory, UpdateWeights
from runtime.messages.ranks import LoadProgress
from runtime.messages.steps import StepPlan
from tests.actors.test_replica import running, seeded
from tests.actors.test_supervisor import answer
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.make_adapter import make_adapter
from tests.test_core import until

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 60))
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
MODEL: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "chunked_prefill_size": 16,
    "enable_memory_saver": True,
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ("all",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


def ranks_of(engine: Engine) -> Ranks:
    return engine._core.replicas[0].supervisor.ranks


def kill_9(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Killer:
    """Kills a rank once, when something happens for the first time in one generation or a later one."""

    def __init__(self, rank: int, generation: int) -> None:
        self.rank = rank
        self.generation = generation
        self.num_kills = 0

    def strike(self, ranks: Ranks) -> None:
        """Something has happened to these ranks."""
        if not self.num_kills and ranks.generation >= self.generation:
            self.num_kills += 1
            kill_9(ranks.pids[self.rank])


# ── while they start ────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def killing_at(moment: str, killer: Killer, patch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Patches what starts ranks so that one is killed at this moment of its start."""
    opened, start = Ranks._open, Ranks.start
    current: list[Ranks] = []

    def spawned(self: Ranks) -> None:
        opened(self)
        current[:] = [self]
        if moment == "spawned":
            killer.strike(self)

    async def started(self: Ranks, on_progress: Any, setup: Any = None) -> Any:
        def progressed(report: LoadProgress) -> None:
            on_progress(report)
            if report.phase == moment:
                killer.strike(current[0])

        return await start(self, progressed, setup)

    async def watch_imports() -> None:
        while moment == "importing" and not killer.num_kills:
            await anyio.sleep(0.01)
            if current and imports_torch(current[0].pids[killer.rank]):
                killer.strike(current[0])

    with patch.context() as patched:
        patched.setattr(Ranks, "_open", spawned)
        patched.setattr(Ranks, "start", started)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_imports)
            yield


def imports_torch(pid: int) -> bool:
    """Whether a process has begun to import torch."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def holds(tp_size: int, rank: int, **_: object) -> bool:
    return rank < tp_size


@pytest.mark.where(holds=holds)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["first start", "recovery"])
@pytest.mark.parametrize("moment", ["spawned", "importing", "weights", "pages"])
async def test_a_rank_is_killed_while_it_starts(
    moment: str, when: str, rank: int, tp_size: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_first = when == "first start"
    killer = Killer(rank, 1 if is_first else 2)
    options = MODEL | {"model_path": str(model), "tensor_parallel_size": tp_size}
    async with killing_at(moment, killer, monkeypatch):
        async with Engine(**options) as engine:
            if is_first:
                got = (await engine.generate(PROMPT, **GREEDY)).token_ids
            else:
                got = []
                async for delta in engine.stream(PROMPT, **GREEDY):
                    got += delta.token_ids
                    if len(got) == 3:
                        kill_9(ranks_of(engine).pids[0])
            assert killer.num_kills == 1
            assert (await engine.generate(PROMPT, **GREEDY)).token_ids == got and len(got) == 24
            assert ranks_of(engine).generation == (2 if is_first else 3)
            assert sample(engine.metrics(), "runtime_failed_requests_total") == 0


# ── while they serve ────────────────────────────────────────────────────────────────────────────────────────

Act = Callable[[Engine, Path], Awaitable[Any]]


async def generate(engine: Engine, adapter: Path) -> None:
    """A request of three chunks and 24 tokens."""
    assert len((await engine.generate(PROMPT, **GREEDY)).token_ids) == 24


async def load_adapter(engine: Engine, adapter: Path) -> None:
    await engine.adapters.load("x", str(adapter))


async def release(engine: Engine, adapter: Path) -> None:
    await engine.release_memory_occupation()
    await engine.resume_memory_occupation()


async def resume(engine: Engine, adapter: Path) -> None:
    if engine._core.health().state == "released":  # an earlier attempt has failed
        await engine.resume_memory_occupation()
    await engine.release_memory_occupation()
    await engine.resume_memory_occupation()


async def update_weights(engine: Engine, adapter: Path) -> None:
    await engine.update_weights_from_disk(engine._core.plan.model.model_path)


def is_prefill(command: Any) -> bool:
    return isinstance(command, StepPlan) and command.token_ids.size > 1


def is_decode(command: Any) -> bool:
    return isinstance(command, StepPlan) and not command.token_ids.size and command.num_decodes > 0


# state of the rank -> the command that it gets as it is killed, and what makes the server send it
STATES: dict[str, tuple[Callable[[Any], bool], Act]] = {
    "prefill": (is_prefill, generate),
    "decode": (is_decode, generate),
    "loading an adapter": (lambda command: isinstance(command, LoadAdapter), load_adapter),
    "releasing memory": (
        lambda command: isinstance(command, ChangeMemory) and bool(command.released),
        release,
    ),
    "resuming memory": (lambda command: isinstance(command, ChangeMemory) and not command.released, resume),
    "checking weights": (
        lambda command: isinstance(command, UpdateWeights) and command.is_trial,
        update_weights,
    ),
    "updating weights": (
        lambda command: isinstance(command, UpdateWeights) and not command.is_trial,
        update_weights,
    ),
}


@pytest.mark.where(holds=holds)
@pytest.mark.sampled(7)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("state", STATES)
async def test_a_rank_is_killed_while_it_serves(
    state: str, rank: int, tp_size: int, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    comes, act = STATES[state]
    killer, submit = Killer(rank, 1), Ranks.submit
    adapter = make_adapter(model, tmp_path / "x", seed=1)

    def submitted(self: Ranks, command: Any) -> bool:
        was_sent = submit(self, command)
        if was_sent and comes(command):
            killer.strike(self)
        return was_sent

    options = MODEL | {"model_path": str(model), "tensor_parallel_size": tp_size}
    async with Engine(**options) as engine:
        expected = (await engine.generate(PROMPT, **GREEDY)).token_ids
        await engine._core.control.flush()
        monkeypatch.setattr(Ranks, "submit", submitted)
        with anyio.fail_after(60):
            while True:  # what operators ask for may be refused while ranks die
                try:
                    await act(engine, adapter)
                    break
                except Unavailable:
                    assert killer.num_kills == 1
                    await anyio.sleep(0.02)
            await until(lambda: ranks_of(engine).generation == 2 and engine._core.health().state == "ready")
        assert killer.num_kills == 1
        assert (await engine.generate(PROMPT, **GREEDY)).token_ids == expected
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages
        assert sample(engine.metrics(), "runtime_failed_requests_total") == 0


@pytest.mark.parametrize("state", ["idle", "sleeping"])
async def test_a_rank_is_killed_while_it_waits(state: str, model: Path) -> None:
    async with Engine(**MODEL | {"model_path": str(model)}) as engine:
        expected = (await engine.generate(PROMPT, **GREEDY)).token_ids
        if state == "sleeping":
            await engine.release_memory_occupation()
        kill_9(ranks_of(engine).pids[0])
        if state == "sleeping":
            sleep = engine._core.replicas[0].supervisor.sleep_state
            await until(lambda: sleep.is_asleep)
            assert await engine.resume_memory_occupation() == ()
        await until(lambda: ranks_of(engine).generation == 2 and engine._core.health().state == "ready")
        assert (await engine.generate(PROMPT, **GREEDY)).token_ids == expected


async def test_ranks_of_both_replicas_are_killed_at_once() -> None:
    async with running(null_step_s=0.002) as core:
        sinks = [seeded(core, i, 60) for i in range(12)]
        await until(lambda: all(len(sink.token_ids()) > 5 for sink in sinks))
        for replica in core.replicas:
            kill_9(replica.supervisor.ranks.pids[0])
        await until(lambda: all(sink.finishes for sink in sinks))
        assert [sink.token_ids() for sink in sinks] == [answer([i, 2], i, 60) for i in range(12)]
        assert [replica.supervisor.generation for replica in core.replicas] == [2, 2]
