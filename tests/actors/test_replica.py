"""Two replicas behind one set of text actors, on the null device."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from runtime.actors.ranks import Ranks
from runtime.core import Core
from runtime.errors import Busy
from runtime.messages.memory import PARTS
from runtime.messages.ranks import Profile
from runtime.messages.requests import FinishReason, GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.actors.sink import ListSink
from tests.actors.test_supervisor import answer
from tests.metrics.read import sample
from tests.test_core import ask, until

pytestmark = pytest.mark.anyio

TURNS = {"load_balance_method": "round_robin"}


@asynccontextmanager
async def running(num_replicas: int = 2, **options: Any) -> AsyncIterator[Core]:
    plan = plan_for(from_values({"device": "null", "data_parallel_size": num_replicas, **TURNS, **options}))
    core = Core(plan)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(core.run)
        await core.wait_ready()
        yield core
        tasks.cancel_scope.cancel()


def seeded(core: Core, seed: int, count: int) -> ListSink:
    """A request whose answer the null device decides: see `answer`."""
    sink = ListSink()
    params = SamplingParams(max_new_tokens=count, ignore_eos=True, seed=seed)
    core.submit(GenerateRequest(id=f"r{seed}", prompt=Tokens([seed, 2]), params=params, arrival_s=0.0), sink)
    return sink


async def test_streams_end_and_no_ids_clash() -> None:
    """Ten requests of two sequences each, five for each replica, in turn."""
    async with running() as core:
        sinks = [ask(core, f"r{i}", max_new_tokens=6, n=2) for i in range(10)]
        await until(lambda: all(len(sink.finishes) == 2 for sink in sinks))
        first, second = (replica.scheduler for replica in core.replicas)
        assert first is not None and second is not None
        assert first.generated_tokens == second.generated_tokens == 60
        seeds = [seeded(core, i, 20) for i in range(12)]
        await until(lambda: all(sink.finishes for sink in seeds))
        assert [sink.token_ids() for sink in seeds] == [answer([i, 2], i, 20) for i in range(12)]


async def test_sequence_ids_are_unique() -> None:
    async with running(null_step_s=0.002) as core:
        sinks = [ask(core, f"r{i}", max_new_tokens=200, n=3) for i in range(6)]
        await until(lambda: core.load().running == 18)
        live = [set(replica.scheduler.roster.live) for replica in core.replicas if replica.scheduler]
        assert live == [set(range(0, 18, 2)), set(range(1, 18, 2))]
        assert core.control.abort("") == 6
        await until(lambda: all(len(sink.finishes) == 3 for sink in sinks))


async def test_an_abort_reaches_the_replica_that_has_the_request() -> None:
    async with running(null_step_s=0.002) as core:
        sinks = [ask(core, f"r{i}", max_new_tokens=1000) for i in range(4)]
        await until(lambda: core.load().running == 4)
        core.abort("r1")
        core.abort("r2")
        await until(lambda: [replica.load().running for replica in core.replicas] == [1, 1])
        assert not sinks[0].finishes and not sinks[3].finishes and not sinks[1].finishes
        assert core.control.abort("r3") == 1
        await until(lambda: sinks[3].finishes)
        assert sinks[3].finishes[0].reason is FinishReason.ABORT
        assert [replica.load().running for replica in core.replicas] == [1, 0]


async def test_stop_strings_end_sequences_of_both() -> None:
    """The detokenizer finds them, and the schedulers free the pages."""
    async with running() as core:
        stop = core.decode(answer([1, 2, 3], 0, 6)[5:])
        sinks = [ask(core, f"r{i}", max_new_tokens=100, seed=0, stop=(stop,)) for i in range(4)]
        await until(lambda: all(sink.finishes for sink in sinks))
        assert {sink.finishes[0].matched for sink in sinks} == {stop}
        await until(lambda: core.load().running == 0)


async def test_pause_flush_load_and_metrics_cover_both() -> None:
    async with running(null_step_s=0.002, page_size=1) as core:
        sinks = [ask(core, f"r{i}", max_new_tokens=300) for i in range(2)]
        await until(lambda: core.load().running == 2)
        with pytest.raises(Busy):
            await core.control.flush()
        await core.control.pause("retract")
        assert core.health().state == "paused" and core.load().waiting == 2
        assert [replica.load().running for replica in core.replicas] == [0, 0]
        assert await core.control.flush() > 0 and core.load().used_pages == 0
        await core.control.resume()
        await until(lambda: core.health().state == "ready")
        await until(lambda: all(sink.finishes for sink in sinks))
        each = [replica.load() for replica in core.replicas]
        load = core.load()
        assert load.total_pages == sum(one.total_pages for one in each) == 2 * each[0].total_pages
        assert load.page_size == each[0].page_size and load.max_running == 2 * each[0].max_running
        metrics = core.metrics()
        assert sample(metrics, "runtime_generated_tokens_total") == 600
        assert sample(metrics, "runtime_pages") == load.total_pages
        assert sample(metrics, "runtime_prompt_tokens_total") == load.prompt_tokens == 6
        assert b'process="rank1"' in metrics
        assert [rank["rank"] for rank in core.server_info()["ranks"]] == [0, 1]


async def test_a_refused_change_of_memory_leaves_both_planning() -> None:
    """One replica has a running request and refuses; the other one must not stay suspended."""
    async with running(null_step_s=0.002, enable_memory_saver=True) as core:
        busy = ask(core, "busy", max_new_tokens=200)
        await until(lambda: core.load().running == 1)
        with pytest.raises(Busy):
            await core.memory_saver.release()
        other = ask(core, "other", max_new_tokens=3)
        await until(lambda: other.finishes)
        await until(lambda: busy.finishes)
        assert await core.memory_saver.release() == PARTS and core.health().state == "released"
        late = [ask(core, f"late{i}", max_new_tokens=3) for i in range(2)]
        await anyio.wait_all_tasks_blocked()
        assert core.load().waiting == 2
        assert await core.memory_saver.resume(["weights"]) == ("kv_cache", "cuda_graph")
        assert await core.memory_saver.resume() == ()
        await until(lambda: all(sink.finishes for sink in late))


async def test_a_killed_rank_of_one_harms_no_request_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    start, answered = Ranks.start, anyio.Event()

    async def start_late(self: Ranks, *arguments: Any, **named: Any) -> Any:
        await answered.wait()
        return await start(self, *arguments, **named)

    async with running(null_step_s=0.002) as core:
        monkeypatch.setattr(Ranks, "start", start_late)
        sinks = [seeded(core, i, 60) for i in range(4)]
        await until(lambda: all(len(sink.token_ids()) > 3 for sink in sinks))
        dying, other = core.replicas
        os.kill(dying.supervisor.ranks.pids[0], signal.SIGKILL)
        await until(lambda: core.health().detail == "1 of 2 replicas are recovering")
        assert core.health().state == "ready"
        await until(lambda: all(sink.finishes for sink in sinks))
        assert dying.supervisor.is_recovering, "the other replica has answered before new ranks came"
        answered.set()
        assert [sink.token_ids() for sink in sinks] == [answer([i, 2], i, 60) for i in range(4)]
        await until(lambda: not dying.supervisor.is_recovering)
        assert dying.supervisor.generation == 2 and other.supervisor.generation == 1
        assert sample(core.metrics(), "runtime_moved_requests_total") == 2
        assert not any(sink.errors for sink in sinks) and core.load().used_pages == core.load().cached_pages


async def test_moved_requests_stop_abort_and_keep_their_siblings() -> None:
    """What is said of sequences that another replica has made finds them where they are."""
    async with running(null_step_s=0.002) as core:
        stop = core.decode(answer([1, 2, 3], 0, 400))  # letters in turn: found at its end alone
        stopped = ask(core, "stopped", max_new_tokens=2000, seed=0, stop=(stop,))
        kept = ask(core, "other", max_new_tokens=4)  # of the second replica
        many = ask(core, "many", max_new_tokens=2000, n=3)
        await until(lambda: kept.finishes and len(stopped.token_ids()) > 3 and core.load().running == 4)
        dying, other = core.replicas
        os.kill(dying.supervisor.ranks.pids[0], signal.SIGKILL)
        await until(lambda: other.load().running == 4)
        assert dying.load().running == dying.load().waiting == 0
        await until(lambda: stopped.finishes)
        assert stopped.finishes[0].matched == stop
        await until(lambda: other.load().running == 3)
        core.abort("many")
        await until(lambda: core.load().running == 0 and not dying.supervisor.is_recovering)
        assert not many.errors and core.load().used_pages == core.load().cached_pages
        again = [seeded(core, i, 5) for i in range(2)]
        await until(lambda: all(sink.finishes for sink in again))


async def test_a_request_that_kills_ranks_is_handed_over_once() -> None:
    """Its second replica tries it until it is found guilty; the first one goes on."""
    async with running(null_step_s=0.002) as core:
        guilty = ask(core, "guilty", max_new_tokens=5000)
        await until(lambda: core.load().running == 1)
        first, second = core.replicas
        os.kill(first.supervisor.ranks.pids[0], signal.SIGKILL)
        await until(lambda: second.load().running == 1)
        for _ in range(2):
            await until(lambda: not first.supervisor.is_recovering and second.load().running == 1)
            os.kill(second.supervisor.ranks.pids[0], signal.SIGKILL)
            await until(lambda: second.supervisor.is_recovering)
        await until(lambda: guilty.errors)
        assert guilty.errors[0].status == 500
        assert first.supervisor.generation == 2


async def test_replicas_of_a_real_model_answer_alike() -> None:
    """Greedy tokens of the embedded model, from each replica."""
    async with running(device="cpu", max_total_tokens=2048) as core:
        sinks = [ListSink() for _ in range(4)]
        params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
        for i, sink in enumerate(sinks):
            prompt = Tokens(list(range(100, 180)))
            core.submit(
                GenerateRequest(id=f"r{i}", prompt=prompt, params=params, arrival_s=0.0, replica=i % 2), sink
            )
        await until(lambda: all(sink.finishes for sink in sinks))
        assert len({tuple(sink.token_ids()) for sink in sinks}) == 1
        assert all(load.steps for load in core.load().each)


async def test_each_replica_writes_its_profiles(tmp_path: Any) -> None:
    async with running() as core:
        assert core.control.start_profile(Profile(folder=str(tmp_path))) == str(tmp_path)
        sinks = [ask(core, f"r{i}", max_new_tokens=5) for i in range(2)]
        await until(lambda: all(sink.finishes for sink in sinks))
        core.control.stop_profile()
        await until(lambda: all((tmp_path / f"replica-{i}" / "rank-0.txt").is_file() for i in range(2)))
