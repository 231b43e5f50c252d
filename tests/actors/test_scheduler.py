"""The scheduler actor with the oracle rank behind it: messages in, messages out."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import anyio
import msgspec
import pytest

from runtime.actors.channels import Channel
from runtime.actors.scheduler import SchedulerActor
from runtime.errors import RankDied
from runtime.messages.requests import FinishReason, Request
from runtime.messages.sampling import Limits, SamplingParams
from runtime.messages.scheduler import (
    Abort,
    Arrive,
    Opened,
    Refused,
    StepTokens,
    Stopped,
    ToDetokenizer,
    ToScheduler,
)
from runtime.messages.steps import Failing, StepPlan, StepResult
from runtime.metrics import Metrics
from runtime.metrics.meter import Meter
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.scheduling.answers import VOCAB, generate
from tests.scheduling.oracle import OracleRank

pytestmark = pytest.mark.anyio


class FakeRanks:
    """Runs plans when `step` is called, with room for `room` of them."""

    def __init__(self, room: int = 8) -> None:
        self.rank = OracleRank(64, 4, 8)
        self.room = room
        self.died: RankDied | None = None
        self.plans: list[StepPlan] = []
        self._done: list[StepResult] = []
        self._wake: Callable[[], None] = lambda: None

    def submit(self, plan: StepPlan) -> bool:
        if len(self.plans) >= self.room:
            return False
        self.plans.append(plan)
        return True

    def results(self) -> list[StepResult]:
        done, self._done = self._done, []
        return done

    def set_wake(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake or (lambda: None)

    def step(self) -> None:
        """One step runs."""
        self._done.append(self.rank.execute(self.plans.pop(0)))
        self._wake()


class Bench:
    """The actor, its channels and what came out."""

    def __init__(self, ranks: FakeRanks, depth: int) -> None:
        config = SchedulerConfig(
            max_running=8, max_step_tokens=32, max_len=100, page_size=4, num_pages=64, eos_ids=(7,)
        )
        self.ranks = ranks
        self.inbox = Channel[ToScheduler](100)
        self.outbox = Channel[ToDetokenizer](1000)
        self.metrics = Metrics()
        self.actor = SchedulerActor(
            Scheduler(config),
            self.inbox,
            self.outbox,
            depth=depth,
            meter=Meter(self.metrics),
            limits=Limits(vocab_size=VOCAB, context_len=100, pool_tokens=252),
        )
        self.seen: list[ToDetokenizer] = []

    async def settle(self) -> None:
        await anyio.wait_all_tasks_blocked()
        if self.outbox.statistics.waiting:
            self.seen += await self.outbox.drain()

    def close(self) -> None:
        self.inbox.discard()
        self.outbox.discard()

    async def run_all(self) -> None:
        await self.settle()
        while self.ranks.plans:
            self.ranks.step()
            await self.settle()

    def tokens(self, sequence_id: int) -> list[int]:
        return [
            t
            for m in self.seen
            if isinstance(m, StepTokens)
            for i, t in zip(m.sequence_ids, m.token_ids, strict=True)
            if i == sequence_id
        ]

    def ends(self) -> dict[int, FinishReason]:
        return {e.sequence_id: e.reason for m in self.seen if isinstance(m, StepTokens) for e in m.ended}


@asynccontextmanager
async def bench(ranks: FakeRanks | None = None, depth: int = 2) -> AsyncIterator[Bench]:
    it = Bench(ranks or FakeRanks(), depth)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(it.actor.run)
        tasks.start_soon(it.actor.drive, it.ranks)
        try:
            yield it
        finally:
            tasks.cancel_scope.cancel()
            it.close()


async def test_what_is_wrong_in_the_cache_is_found_when_no_request_is_there() -> None:
    async with bench() as b:
        (lost,) = b.actor.scheduler.cache.pool.allocate(1)
        b.inbox.send_nowait(Arrive(request("a", max_new_tokens=3)))
        await b.run_all()
        assert len(b.tokens(0)) == 3 and b.metrics.cache_leaks.value == 1
        assert b.actor.limits.pool_tokens == 62 * 4 and lost in b.actor.scheduler.cache.pool.broken
        b.inbox.send_nowait(Arrive(request("b", max_new_tokens=3)))
        await b.run_all()
        assert len(b.tokens(1)) == 3 and b.metrics.cache_leaks.value == 1


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> Request:
    return Request(
        id=name,
        prompt_ids=list(prompt),
        params=SamplingParams(**{"ignore_eos": True, **params}),
        seed=1,
        arrival_s=0,
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_tokens_come_out_in_order(depth: int) -> None:
    async with bench(depth=depth) as b:
        b.inbox.send_nowait(Arrive(request(max_new_tokens=6)))
        await b.run_all()
        assert isinstance(b.seen[0], Opened) and b.seen[0].sequence_ids == [0]
        assert b.tokens(0) == generate([1, 2, 3], set(), 9)
        assert b.ends() == {0: FinishReason.LENGTH}
        assert b.metrics.ttft_s.counts != b.metrics.itl_s.counts and sum(b.metrics.itl_s.counts) == 5


async def test_a_request_whose_time_is_up_is_refused() -> None:
    """Nothing runs and no message comes: the clock alone wakes the actor."""
    async with bench(FakeRanks(room=0)) as b:
        b.inbox.send_nowait(Arrive(request("waits", max_new_tokens=6)))
        await b.settle()
        late = msgspec.structs.replace(
            request("late"), arrival_s=monotonic(), queue_timeout_s=1e-9, timeout_s=1e-6
        )
        b.inbox.send_nowait(Arrive(late))
        with anyio.fail_after(60):
            while not any(isinstance(message, Refused) for message in b.seen):
                b.seen += await b.outbox.drain()
        (refusal,) = [message for message in b.seen if isinstance(message, Refused)]
        assert (refusal.request_id, refusal.status) == ("late", 503)
        assert b.actor.scheduler.roster.siblings("waits") and b.metrics.refused["503"] == 1


async def test_prompts_are_cut_where_that_is_asked_for() -> None:
    async with bench() as b:
        b.actor.limits = Limits(vocab_size=VOCAB, context_len=100, pool_tokens=10, cuts=True)
        b.inbox.send_nowait(Arrive(request(prompt=tuple(range(40)), max_new_tokens=1)))
        await b.run_all()
        assert isinstance(b.seen[0], Opened) and b.seen[0].request.prompt_ids == list(range(9))


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_no_more_than_depth_steps_in_flight(depth: int) -> None:
    async with bench(depth=depth) as b:
        b.inbox.send_nowait(Arrive(request(max_new_tokens=20)))
        await b.settle()
        assert len(b.ranks.plans) == depth
        b.ranks.step()
        await b.settle()
        assert len(b.ranks.plans) == depth


async def test_a_full_ring_loses_nothing() -> None:
    async with bench(FakeRanks(room=1), depth=3) as b:
        for k in range(5):
            b.inbox.send_nowait(Arrive(request(f"r{k}", prompt=(k + 1, 2), max_new_tokens=9)))
        await b.run_all()
        assert [b.tokens(k) for k in range(5)] == [generate([k + 1, 2], set(), 11) for k in range(5)]


async def test_abort_frees_pages_within_two_steps() -> None:
    async with bench() as b:
        b.inbox.send_nowait(Arrive(request(max_new_tokens=50)))
        await b.settle()
        b.ranks.step()
        await b.settle()
        b.inbox.send_nowait(Abort("r"))
        await b.settle()
        assert b.actor.scheduler.roster.num_running == 0
        await b.run_all()
        assert b.ends() == {0: FinishReason.ABORT} and b.ranks.rank.step <= 3
        cache = b.actor.scheduler.cache
        assert cache.num_used == cache.tree.num_evictable


async def test_abort_before_anything_runs_is_reported() -> None:
    async with bench(FakeRanks(room=0)) as b:
        b.inbox.send_nowait(Arrive(request()))
        b.inbox.send_nowait(Abort("r"))
        b.inbox.send_nowait(Abort("unknown"))
        await b.settle()
        assert b.ends() == {0: FinishReason.ABORT}


async def test_a_stopped_sequence_runs_no_more() -> None:
    async with bench() as b:
        b.inbox.send_nowait(Arrive(request(max_new_tokens=50)))
        await b.settle()
        b.inbox.send_nowait(Stopped([0]))
        await b.run_all()
        assert b.ends() == {} and b.ranks.rank.step == 2 and b.metrics.finished["stop"] == 1


async def test_the_scheduler_checks_again() -> None:
    async with bench() as b:
        b.inbox.send_nowait(Arrive(request(prompt=(VOCAB,))))
        b.inbox.send_nowait(Arrive(request("long", prompt=(1,) * 100)))
        await b.settle()
        assert [(m.request_id, m.status, m.param) for m in b.seen if isinstance(m, Refused)] == [
            ("r", 400, "input_ids"),
            ("long", 400, "prompt"),
        ]


async def test_the_actor_goes_on_with_the_next_ranks() -> None:
    it = Bench(FakeRanks(), 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(it.actor.run)
        it.inbox.send_nowait(Arrive(request("a", max_new_tokens=9)))
        it.inbox.send_nowait(Arrive(request("gone", prompt=(8, 9), max_new_tokens=9)))
        first = it.ranks
        deaths: list[RankDied] = []

        async def drive() -> None:
            deaths.append(await it.actor.drive(it.ranks))

        tasks.start_soon(drive)
        await it.settle()
        first.step()
        first.died = RankDied(0, -9)
        await it.settle()
        assert deaths == [first.died] and len(it.tokens(0)) == 1, "what was done before the death counts"
        lost = await it.actor.lose_ranks()
        assert (lost.num_requests, lost.guilty) == (2, None)
        it.inbox.send_nowait(Abort("gone"))
        it.inbox.send_nowait(Arrive(request("late", prompt=(4, 5), max_new_tokens=3)))
        await it.settle()
        assert len(it.tokens(0)) == 1, "nothing runs between the generations"
        it.ranks = FakeRanks()
        it.ranks.rank.step = it.actor.scheduler.totals.steps
        await it.actor.resume(64, 0)
        tasks.start_soon(drive)
        await it.run_all()
        tasks.cancel_scope.cancel()
    it.close()
    assert it.tokens(0) == generate([1, 2, 3], set(), 12) and it.tokens(2) == generate([4, 5], set(), 5)
    assert it.ends() == {0: FinishReason.LENGTH, 1: FinishReason.ABORT, 2: FinishReason.LENGTH}


async def test_a_request_that_is_alone_at_two_deaths_fails() -> None:
    it = Bench(FakeRanks(), 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(it.actor.run)
        it.inbox.send_nowait(Arrive(request(n=2)))
        for num_failed in (0, 1):
            ranks = FakeRanks()
            tasks.start_soon(it.actor.drive, ranks)
            await it.settle()
            ranks.died = RankDied(0, 1)
            ranks._wake()
            await it.settle()
            await it.actor.lose_ranks()
            assert it.metrics.failed.value == num_failed
        await it.settle()
        tasks.cancel_scope.cancel()
    it.close()
    refused = [m for m in it.seen if isinstance(m, Refused)]
    assert (
        [(m.request_id, m.status) for m in refused] == [("r", 500)]
        and "r" in refused[0].message
        and it.ends() == {}
    )
    assert sum(it.metrics.e2e_s.counts) == 2 and not it.actor.scheduler.roster.live


async def test_ranks_with_less_memory_refuse_what_has_no_room() -> None:
    it = Bench(FakeRanks(room=0), 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(it.actor.run)
        it.inbox.send_nowait(Arrive(request("before", prompt=(1,) * 50)))
        await it.settle()
        await it.actor.lose_ranks()
        await it.actor.resume(9, 0)  # 32 tokens
        it.inbox.send_nowait(Arrive(request("after", prompt=(1,) * 50)))
        await it.settle()
        tasks.cancel_scope.cancel()
    it.close()
    assert [(m.request_id, m.status) for m in it.seen if isinstance(m, Refused)] == [
        ("before", 503),
        ("after", 400),
    ]


async def test_a_request_whose_grammar_cannot_be_followed_fails_alone() -> None:
    async with bench() as b:
        for name in ("a", "b"):
            b.inbox.send_nowait(Arrive(request(name, max_new_tokens=6)))
        await b.settle()
        b.ranks.step()
        await b.settle()
        plan = b.ranks.plans.pop(0)
        b.ranks._done.append(msgspec.structs.replace(b.ranks.rank.execute(plan), failed={1: Failing.GRAMMAR}))
        b.ranks._wake()
        await b.run_all()
        (refused,) = [message for message in b.seen if isinstance(message, Refused)]
        assert (refused.request_id, refused.status) == (
            "b",
            400,
        ) and "could not be followed" in refused.message
        assert b.ends() == {0: FinishReason.LENGTH} and len(b.tokens(0)) == 6 and len(b.tokens(1)) < 3
        assert not b.actor.scheduler.failed and not b.actor.scheduler.roster.num_running
