"""Captures are requested between steps, by the scheduler actor's own rounds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.actors.graph_captures import GraphCapturing
from runtime.cache.sequence import Sequence
from runtime.messages.ranks import Capture, Captured
from runtime.messages.scheduler import Arrive
from runtime.messages.steps import StepPlan, StepResult
from runtime.metrics import Metrics
from runtime.scheduling.drafts import Draft, Drafter
from runtime.scheduling.graph_captures import Captures
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.actors.test_scheduler import Bench, FakeRanks, bench, request

pytestmark = pytest.mark.anyio


class CapturingRanks(FakeRanks):
    """Captures requested sizes when `answer` is called."""

    def __init__(self, fails: int = 99) -> None:
        super().__init__()
        self.fails = fails
        self.asked: list[int] = []
        self.captured: list[Captured] = []
        self.num_changes = 0

    def submit(self, plan: StepPlan | Capture) -> bool:
        if isinstance(plan, Capture):
            self.asked.append(plan.size)
            self.unit = plan.unit
            return True
        return super().submit(plan)

    def strand(self) -> None:
        self.captured.append(Captured(self.asked[-1], 0.25, 0, "OutOfMemoryError: full", "sequences", True))

    def answer(self) -> None:
        size = self.asked[-1]
        self.captured.append(
            Captured(size, 0.25, 2**20, "OutOfMemoryError: full" if size >= self.fails else "", self.unit)
        )
        self._wake()


def looking(b: Bench, observe: Callable[..., None]) -> None:
    b.actor._observers = (observe,)


async def test_while_no_request_is_there_all_sizes_are_captured() -> None:
    ranks, metrics = CapturingRanks(fails=4), Metrics()
    async with bench(ranks) as b:
        looking(b, GraphCapturing([Captures([1, 2, 4, 8])], metrics).observe)
        await b.settle()
        for _ in range(3):
            ranks.answer()
            await b.settle()
        assert ranks.asked == [1, 2, 4]
        assert (
            metrics.captured_sizes.value == 2
            and metrics.capture_s.value == 0.75
            and metrics.capture_failures.value == 1
        )


async def test_steps_go_on_during_a_capture_and_no_second_one_is_asked_for() -> None:
    ranks: Any = CapturingRanks()
    async with bench(ranks) as b:
        looking(b, GraphCapturing([Captures([1, 2])], Metrics()).observe)
        await b.settle()
        b.inbox.send_nowait(Arrive(request(max_new_tokens=6)))
        await b.run_all()
        assert len(b.tokens(0)) == 6 and ranks.asked == [1]
        ranks.answer()
        await b.settle()
        assert ranks.asked == [1, 2]


async def test_new_ranks_capture_anew() -> None:
    ranks, capturing = CapturingRanks(), GraphCapturing([Captures([1])], Metrics())
    async with bench(ranks) as b:
        looking(b, capturing.observe)
        await b.settle()
        ranks.answer()
        await b.settle()
        fresh = CapturingRanks()
        capturing.observe(b.actor.scheduler, fresh)
        assert ranks.asked == [1] and fresh.asked == [1]


async def test_two_kinds_one_after_the_other() -> None:
    """Decode steps first; of steps with prompts, those of the sizes that came."""
    ranks: Any = CapturingRanks()
    metrics = Metrics()
    async with bench(ranks) as b:
        looking(b, GraphCapturing([Captures([1]), Captures([2, 4, 8], "tokens")], metrics).observe)
        await b.settle()
        b.inbox.send_nowait(Arrive(request(max_new_tokens=2)))
        await b.run_all()
        for _ in range(3):
            ranks.answer()
            await b.settle()
        assert len(request().prompt_ids) == 3 and ranks.asked == [1, 4, 2, 8] and ranks.unit == "tokens"
        assert (metrics.captured_sizes.value, metrics.captured_piecewise.value) == (1, 2)


class OneDraft(Drafter):
    """Proposes a draft for every row."""

    def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
        return Draft([7]) if most else None


def test_steps_that_verify_drafts_are_a_kind_of_their_own() -> None:
    """Their sizes are counted by steps that have drafts, and captured behind those of decode steps."""
    config = SchedulerConfig(
        max_running=2, max_step_tokens=8, max_len=20, page_size=1, num_pages=30, eos_ids=()
    )
    scheduler, metrics = Scheduler(config, drafter=OneDraft()), Metrics()
    decodes, verifies, ranks = Captures([1, 2]), Captures([1, 2], "verifies"), CapturingRanks()
    capturing = GraphCapturing([decodes, verifies], metrics)
    scheduler.add(request(max_new_tokens=6))
    for tokens in ([1], [2], [7, 3]):
        plan = scheduler.plan()
        assert plan is not None
        num = np.array([len(tokens)], np.int32) if plan.num_verifies else None
        empty = np.empty(0, np.float32)
        ids = np.array(tokens, np.int32)
        scheduler.apply(StepResult(plan.step, ids, -1, empty, empty, empty, [], 0.01, num_tokens=num))
        capturing.observe(scheduler, ranks)
    assert scheduler.totals.verify_steps == 2
    assert (decodes.uses, verifies.uses) == ({1: 0, 2: 0}, {1: 2, 2: 0})
    scheduler.end([next(iter(scheduler.roster.live))])
    for _ in range(4):
        capturing.observe(scheduler, ranks)
        ranks.captured.append(Captured(ranks.asked[-1], 0.25, 0, "", ranks.unit))
    capturing.observe(scheduler, ranks)
    assert ranks.asked == [1, 2, 1, 2] and ranks.unit == "verifies"
    assert metrics.captured_sizes.value == metrics.captured_verifies.value == 2


async def test_what_was_captured_before_memory_went_is_captured_anew() -> None:
    ranks: Any = CapturingRanks()
    captures = Captures([1, 2])
    async with bench(ranks) as b:
        looking(b, GraphCapturing([captures], Metrics()).observe)
        await b.settle()
        b.actor.scheduler.is_suspended = True
        # memory is given back behind the capture that is under way, and the answer to that comes late
        ranks.num_changes += 1
        ranks.answer()
        await b.settle()
        assert ranks.asked == [1] and captures.done == []
        b.actor.scheduler.is_suspended = False
        b.actor._wake.set()
        for _ in range(2):
            await b.settle()
            ranks.answer()
        await b.settle()
        assert ranks.asked == [1, 1, 2] and captures.done == [1, 2]


def test_a_capture_that_ended_the_ranks_is_not_tried_on_the_next() -> None:
    """The ranks answer and end before the actor looks at either."""
    captures, metrics = Captures([1, 2, 4]), Metrics()
    capturing, scheduler = (
        GraphCapturing([captures], metrics),
        Scheduler(
            SchedulerConfig(
                max_running=1, max_step_tokens=8, max_len=10, page_size=1, num_pages=8, eos_ids=()
            )
        ),
    )
    ranks = CapturingRanks()
    for _ in range(2):
        capturing.observe(scheduler, ranks)
        ranks.captured.append(Captured(ranks.asked[-1], 0.25, 0, "")) if ranks.asked[
            -1
        ] == 1 else ranks.strand()
    assert ranks.asked == [1, 2]
    following = CapturingRanks()
    capturing.observe(scheduler, following)
    assert following.asked == [1] and captures.sizes == [1] and metrics.capture_failures.value == 1
