"""Memory that is given back while the server lives: who waits, who is refused, and what a death of the ranks
means."""

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.actors.ranks import Ranks
from runtime.actors.stream_sink import StreamSink
from runtime.errors import Busy, InvalidRequest, StartError, Unavailable
from runtime.messages.memory import PARTS
from runtime.messages.requests import GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from tests.actors.test_supervisor import NULL, answer, kill, settled
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("forked_children")]

CPU: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "enable_memory_saver": True,
}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


async def late(engine: Engine, answers: list[list[int]]) -> None:
    answers.append((await engine.generate([9], seed=1, max_new_tokens=5, ignore_eos=True)).token_ids)


async def test_requests_wait_and_health_says_so() -> None:
    async with Engine(**NULL, enable_memory_saver=True) as engine:
        assert await engine.release_memory_occupation() == PARTS
        assert await engine.release_memory_occupation(["weights"]) == PARTS, "more of the same"
        health = engine._core.health()
        assert health.state == "released" and "kv_cache, weights, cuda_graph" in health.detail
        answers: list[list[int]] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late, engine, answers)
            assert await engine.resume_memory_occupation(["weights"]) == ("kv_cache", "cuda_graph")
            await engine.continue_generation()  # there was no pause
            await anyio.wait_all_tasks_blocked()
            assert not answers and engine.load().waiting == 1
            assert await engine.resume_memory_occupation() == ()
        assert answers == [answer([9], 1, 5)] and engine._core.health().state == "ready"
        assert await engine.resume_memory_occupation() == (), "nothing is left to take"


async def test_who_runs_must_be_paused() -> None:
    async with Engine(**NULL, null_step_s=0.002, enable_memory_saver=True) as engine:
        stream = engine.stream([1, 2], seed=3, max_new_tokens=60, ignore_eos=True)
        got = (await anext(stream)).token_ids
        for parts in (None, ["weights"]):
            with pytest.raises(Busy, match="retract"):
                await engine.release_memory_occupation(parts)  # type: ignore[arg-type]
        assert engine._core.health().state == "ready"
        await engine.pause_generation("in_place")
        assert await engine.release_memory_occupation(["weights"]) == ("weights",), "pages stay"
        with pytest.raises(Busy, match="retract"):
            await engine.release_memory_occupation(["kv_cache"])
        await engine.continue_generation()
        await anyio.wait_all_tasks_blocked()
        assert engine._core.health().state == "released" and engine.load().running == 1
        assert await engine.resume_memory_occupation() == ()
        await engine.pause_generation("retract")
        await engine.release_memory_occupation()
        assert engine.load().used_pages == 0 and engine.load().waiting == 1
        await engine.resume_memory_occupation()
        assert engine._core.health().state == "paused"
        await engine.continue_generation()
        async for delta in stream:
            got += delta.token_ids
        assert got == answer([1, 2], 3, 60)


async def test_without_the_option_nothing_is_given_back() -> None:
    async with Engine(**NULL) as engine:
        with pytest.raises(InvalidRequest, match="--enable-memory-saver"):
            await engine.release_memory_occupation()
        assert engine._core.health().state == "ready"


async def test_ranks_that_die_meanwhile_come_back_when_all_is_wanted() -> None:
    async with Engine(**NULL, tensor_parallel_size=2, enable_memory_saver=True) as engine:
        await engine.release_memory_occupation(["kv_cache"])
        kill(engine, 1)
        supervisor = engine._core.replicas[0].supervisor
        with anyio.fail_after(30):
            while not supervisor.sleep_state.is_asleep:
                await anyio.sleep(0.005)
        assert engine._core.health().state == "released" and supervisor.generation == 1
        assert await engine.release_memory_occupation(["weights"]) == ("kv_cache", "weights")
        with pytest.raises(Unavailable):
            await engine.update_weights_from_disk("elsewhere")
        assert (
            await engine.resume_memory_occupation(["kv_cache"]) == ("weights",) and supervisor.generation == 1
        )
        assert await engine.resume_memory_occupation() == ()
        assert supervisor.generation == 2 and engine._core.health().state == "ready"
        assert (await engine.generate([5], seed=0, max_new_tokens=3, ignore_eos=True)).token_ids == answer(
            [5], 0, 3
        )


async def test_a_death_while_it_is_given_back_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Ranks.submit

    def deadly(self: Ranks, plan: Any) -> bool:
        os.kill(self.pids[0], signal.SIGKILL)
        return submit(self, plan)

    async with Engine(**NULL, enable_memory_saver=True) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "submit", deadly)
            assert await engine.release_memory_occupation() == PARTS
        await settled(engine, "released")
        assert await engine.resume_memory_occupation() == ()
        await engine.release_memory_occupation()
        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "submit", deadly)
            with pytest.raises(Unavailable):  # dead or alive, not everything is held
                await engine.resume_memory_occupation()
        assert engine._core.health().state == "released"
        assert (
            await engine.resume_memory_occupation() == ()
            and engine._core.replicas[0].supervisor.generation == 3
        )
        assert (await engine.generate([5], seed=0, max_new_tokens=3, ignore_eos=True)).token_ids == answer(
            [5], 0, 3
        )


async def test_a_start_that_is_in_vain_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine(**NULL, enable_memory_saver=True) as engine:
        await engine.release_memory_occupation()
        kill(engine)
        with anyio.fail_after(30):
            while not engine._core.replicas[0].supervisor.sleep_state.is_asleep:
                await anyio.sleep(0.005)

        async def refuse(self: Ranks, *_: Any) -> Any:
            raise StartError("there is no device any more")

        monkeypatch.setattr(Ranks, "start", refuse)
        with pytest.raises(Unavailable, match="could not be started"):
            await engine.resume_memory_occupation()


async def test_tokens_are_the_same_after_it(tmp_path: Path) -> None:
    """Prompts in host memory are found again, and other weights say something else."""
    one, two = make_checkpoint("qwen3", tmp_path / "one"), make_checkpoint("qwen3", tmp_path / "two", seed=1)
    make_checkpoint("qwen3", tmp_path / "deep", num_hidden_layers=3)
    prompt = [*range(10, 60)]
    async with Engine(model_path=str(two), **CPU) as engine:
        theirs = (await engine.generate(prompt, **GREEDY)).token_ids
    async with Engine(
        model_path=str(one),
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_write_policy="write_through",
        **CPU,
    ) as engine:
        first = await engine.generate(prompt, **GREEDY)
        await engine.release_memory_occupation()
        ranks = engine._core.server_info()["ranks"]
        assert (
            engine._core.server_info()["released"] == list(PARTS)
            and ranks[0]["weights_bytes"] == ranks[0]["pages_bytes"] == 0
        )
        await engine.resume_memory_occupation()
        again = await engine.generate(prompt, **GREEDY)
        assert again.token_ids == first.token_ids and first.token_ids != theirs
        assert again.finish is not None and again.finish.cached_tokens >= 16, (
            "host memory has the prompt still"
        )
        for wrong in ("deep", "nowhere"):
            with pytest.raises(InvalidRequest):
                await engine.update_weights_from_disk(str(tmp_path / wrong))
        assert (await engine.generate(prompt, **GREEDY)).token_ids == first.token_ids
        await engine.update_weights_from_disk(str(two), weight_version="2")
        assert engine._core.card.weight_version == "2"
        updated = await engine.generate(prompt, **GREEDY)
        assert (
            updated.token_ids == theirs and updated.finish is not None and updated.finish.cached_tokens == 0
        )
        kill(engine)
        assert (await engine.generate([*prompt, 1], **GREEDY)).token_ids != [] and engine._core.replicas[
            0
        ].supervisor.generation == 2
        assert (await engine.generate(prompt, **GREEDY)).token_ids == theirs, "new ranks have the new weights"


async def test_a_server_without_weights_waits_for_them(tmp_path: Path) -> None:
    """It is loading, holds requests, and serves them with the weights that come; a failed update changes
    nothing."""
    folder = make_checkpoint("qwen3", tmp_path / "one")
    async with Engine(model_path=str(folder), **CPU) as engine:
        expected = (await engine.generate([5, 6, 7], **GREEDY)).token_ids
    waiting = Engine(
        model_path=str(folder),
        load_format="dummy",
        checkpoint_engine_wait_weights_before_ready=True,
        **(CPU | {"enable_memory_saver": False}),
    )
    with pytest.raises(StartError, match="runtime serve"):
        await waiting.__aenter__()
    core, sink = waiting._core, StreamSink(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(core.run)
        with anyio.fail_after(60):
            while "waiting for weights" not in core.health().detail:
                await anyio.sleep(0.005)
        params = SamplingParams(**GREEDY)
        core.submit(GenerateRequest(id="x", prompt=Tokens([5, 6, 7]), params=params, arrival_s=0.0), sink)
        with pytest.raises(InvalidRequest):
            await core.memory_saver.update_weights(str(tmp_path / "nowhere"))
        await anyio.wait_all_tasks_blocked()
        assert core.health().state == "loading" and core.load().steps == 0 and core.load().waiting == 1
        await core.memory_saver.update_weights(str(folder))
        await core.wait_ready()
        assert core.health().state == "ready"
        found: list[int] = []
        while deltas := await sink.take():
            found += [token for delta in deltas for token in delta.token_ids]
        assert found == expected
        tasks.cancel_scope.cancel()
