"""Attention groups on the null device: their steps leave together, and a dead rank is a pause for all."""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from runtime.actors.attention_groups import GroupFlights
from runtime.core import Core
from runtime.errors import Busy
from runtime.messages.requests import GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import GroupSteps, StepPlan, StepResult
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.actors.sink import ListSink
from tests.actors.test_replica import seeded
from tests.actors.test_supervisor import POISON, answer
from tests.metrics.read import sample
from tests.test_core import ask, until

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {
    "device": "null",
    "tensor_parallel_size": 4,
    "data_parallel_size": 2,
    "enable_dp_attention": True,
    "load_balance_method": "round_robin",
    "standby_ranks": 0,
}


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Core]:
    core = Core(plan_for(from_values(OPTIONS | options)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(core.run)
        await core.wait_ready()
        yield core
        tasks.cancel_scope.cancel()


def plan_of(step: int) -> StepPlan:
    none = np.empty(0, np.int32)
    return StepPlan(step=step, num_decodes=0, slots=none, counts=none, samples=np.empty(0, np.uint8))


def result_of(step: int, group: int) -> StepResult:
    ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
    return StepResult(step, ints, -1, floats, ints, floats, [], 0.0, group=group)


def test_a_step_is_done_when_all_its_groups_are() -> None:
    flights = GroupFlights()
    assert [flights.add([plan_of(1), plan_of(1)]).step, flights.add([None, plan_of(2)]).step] == [1, 2]
    flights.take(result_of(1, 1))
    flights.take(result_of(2, 1))
    assert len(flights) == 2, "the first one waits for group 0"
    flights.take(result_of(1, 0))
    assert not len(flights)


def watch_steps(core: Core) -> list[GroupSteps]:
    """The steps that the ranks get from now on."""
    ranks = core.replicas[0].supervisor.ranks
    sent: list[GroupSteps] = []
    submit = ranks.submit

    def watched(command: Any) -> bool:
        if isinstance(command, GroupSteps):
            sent.append(command)
        return submit(command)

    ranks.submit = watched  # type: ignore[method-assign]
    return sent


async def test_groups_are_computed_together() -> None:
    """Whenever both have something to do, a step has both."""
    async with running(null_step_s=0.001) as core:
        sent = watch_steps(core)
        sinks = [seeded(core, i, 40) for i in range(6)]
        await until(lambda: all(sink.finishes for sink in sinks))
        assert [sink.token_ids() for sink in sinks] == [answer([i, 2], i, 40) for i in range(6)]
        kinds = Counter(tuple(plan is not None for plan in step.plans) for step in sent)
        assert kinds[True, True] >= 38 and sum(kinds.values()) <= kinds[True, True] + 6
        sent.clear()
        alone = seeded(core, 6, 10)
        await until(lambda: alone.finishes)
        assert len({tuple(plan is not None for plan in step.plans) for step in sent}) == 1


async def test_prompts_wait_until_all_groups_have_some() -> None:
    """With the prefill delayer: a step with prompts takes all groups longer."""
    delayed = {"enable_prefill_delayer": True, "prefill_delayer_max_delay_passes": 200}
    async with running(null_step_s=0.001, **delayed) as core:
        sent = watch_steps(core)
        streams = [seeded(core, i, 900) for i in range(2)]  # the second one waits for 200 steps
        await until(lambda: core.load().running == 2)
        first = seeded(core, 2, 5)
        before = len(streams[0].token_ids())
        await until(lambda: len(streams[0].token_ids()) > before + 60)
        assert not first.token_ids(), "the other group has no prompt"
        sent.clear()
        second = seeded(core, 3, 5)
        await until(lambda: first.finishes and second.finishes)
        assert [sink.token_ids() for sink in (first, second)] == [answer([i, 2], i, 5) for i in (2, 3)]
        has_prompts = [
            [plan is not None and len(plan.slots) > plan.num_decodes for plan in step.plans] for step in sent
        ]
        assert [each for each in has_prompts if any(each)] == [[True, True]]
        assert (
            not streams[0].finishes
            and sample(core.metrics(), 'runtime_prefill_delays_total{reason="full"}') >= 1
        )


async def test_sequence_ids_loads_and_control() -> None:
    async with running(null_step_s=0.002, page_size=1) as core:
        sinks = [ask(core, f"r{i}", max_new_tokens=300) for i in range(4)]
        await until(lambda: core.load().running == 4)
        live = [set(replica.scheduler.roster.live) for replica in core.replicas if replica.scheduler]
        assert live == [{0, 2}, {1, 3}]
        each = [replica.load() for replica in core.replicas]
        assert [load.running for load in each] == [2, 2]
        assert core.load().total_pages == sum(load.total_pages for load in each)
        assert [rank["rank"] for rank in core.server_info()["ranks"]] == [0, 1, 2, 3]
        with pytest.raises(Busy):
            await core.control.flush()
        await core.control.pause("retract")
        assert core.health().state == "paused" and core.load().waiting == 4
        await core.control.resume()
        core.abort("r1")
        await until(lambda: all(sinks[i].finishes for i in (0, 2, 3)))


@pytest.mark.parametrize("victim", [0, 3])
async def test_a_killed_rank_is_a_pause_for_all(victim: int) -> None:
    async with running(null_step_s=0.001) as core:
        sinks = [seeded(core, i, 60) for i in range(6)]
        await until(lambda: core.load().running == 6)
        os.kill(core.replicas[0].supervisor.ranks.pids[victim], signal.SIGKILL)
        await until(lambda: all(sink.finishes for sink in sinks))
        assert [sink.token_ids() for sink in sinks] == [answer([i, 2], i, 60) for i in range(6)]
        assert core.replicas[0].supervisor.generation == 2


@pytest.mark.parametrize(("poisoned", "count"), [(0, 2), (1, 2), (3, 7)])
async def test_the_request_that_kills_is_found_in_its_group(poisoned: int, count: int) -> None:
    """The other group has a request, or several, in flight at the same deaths."""
    async with running(null_poison_token=POISON, null_poison="kill", null_step_s=0.001) as core:
        sinks = []
        for i in range(count):
            params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=i)
            prompt = Tokens([1, POISON if i == poisoned else 3, i])
            sinks.append(ListSink())
            core.submit(GenerateRequest(id=f"r{i}", prompt=prompt, params=params, arrival_s=0.0), sinks[i])
        with anyio.fail_after(120):
            while not all(sink.finishes or sink.errors for sink in sinks):
                await anyio.sleep(0.01)
        assert [[error.status for error in sink.errors] for sink in sinks] == [
            [500] if i == poisoned else [] for i in range(count)
        ]
        assert all(
            sink.token_ids() == answer([1, 3, i], i, 40) for i, sink in enumerate(sinks) if i != poisoned
        )
