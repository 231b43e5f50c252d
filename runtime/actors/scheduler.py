"""The scheduler actor: a thin shell of tasks around the pure Scheduler. One loop: take in results, plan
ahead, submit.

The actor outlives the ranks: `run` takes messages in all the time, `drive` runs steps on one generation of
ranks until it dies, and between two generations requests wait (actors/supervisor.py).

At most `depth` steps are in flight. With two, step n+1 is planned and lies in the ring before step n's tokens
are known, so the ranks never wait for the event loop (an overlap scheduler, as an async pipeline). A pipeline
of stages has more (scheduling/micro_batches.py).
"""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from msgspec import structs

from runtime import log
from runtime.actors.channels import Channel, Signal
from runtime.cache.audit import Findings
from runtime.cache.journal import CacheEvents
from runtime.cache.sequence import Sequence
from runtime.errors import Busy, InvalidRequest, RankDied
from runtime.messages.requests import Request
from runtime.messages.sampling import Limits, check, cut
from runtime.messages.scheduler import (
    Abort,
    Arrive,
    Continue,
    Flush,
    Opened,
    Pause,
    Refused,
    ResumePlanning,
    StepTokens,
    Stopped,
    SuspendPlanning,
    ToDetokenizer,
    ToScheduler,
    Unload,
)
from runtime.messages.steps import Failing, StepPlan, StepResult
from runtime.metrics.meter import Meter
from runtime.scheduling.pausing import flush, lose_pages, pause, resume_planning, suspend, unpause
from runtime.scheduling.recovery import GivenUp, Lost
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.upkeep import Upkeep

AUDIT_EVERY_S = 10.0  # at most, when there is nothing else to do

# status and message
FAILINGS = {
    Failing.GRAMMAR: (400, "the constraint could not be followed to its end; simplify it"),
    Failing.PROCESSOR: (500, "the logit processor failed; the server's log has the details under {id}"),
}


class Steps(Protocol):
    """Where plans go and results come from; actors/ranks.py is one."""

    died: RankDied | None  # set once, when a rank is lost

    def submit(self, plan: StepPlan) -> bool:
        """Hands the plan over. False: there is no room now; try again when `set_wake`'s callback is
        called."""
        ...

    def results(self) -> list[StepResult]:
        """Results that have arrived, oldest first."""
        ...

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` is called when results have come or a rank has died."""
        ...


class Storage(Protocol):
    """The storage tier, as far as the scheduler actor calls it; actors/storage.py is one."""

    def saved(self) -> None:
        """Pages may have come to host memory."""
        ...

    def arrived(self, sequence: Sequence) -> None:
        """A sequence waits for its turn; it may be held until its prefix has come from storage."""
        ...


S = TypeVar("S", bound=Steps)


class SchedulerActor(Generic[S]):
    """Owns the scheduler. Messages in: those of ToScheduler. Out: Opened, StepTokens, Refused."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Channel[ToScheduler],
        outbox: Channel[ToDetokenizer],
        *,
        limits: Limits,
        depth: int,
        meter: Meter,
        signal: Signal | None = None,
        storage: Storage | None = None,
        publish: Callable[[CacheEvents], None] | None = None,
        observers: Iterable[Callable[[Scheduler, S], None]] = (),
        forward: Callable[[Abort | Stopped], None] = lambda message: None,
    ) -> None:
        """`signal` starts a round of the pipeline, as when `storage` has brought pages; `publish` takes what
        the scheduler's journal has collected; `observers` are called with the scheduler and the ranks after
        each round; `forward` gets messages about what is not here. None of them may wait or raise."""
        self.scheduler = scheduler
        self.limits = limits
        self.depth = depth
        self._inbox = inbox
        self._outbox = outbox
        self._meter = meter
        self._publish = publish
        self._observers = tuple(observers)
        self._forward = forward
        self._wake = signal or Signal()
        self._armed = anyio.Event()  # there is a new deadline
        self._upkeep = Upkeep(scheduler)
        self._audited_s = -AUDIT_EVERY_S
        self._unsent: StepPlan | None = None  # planned, but the ring was full
        self._storage = storage
        self._pausing: list[Pause | SuspendPlanning] = []  # to be answered when no step is in flight

    async def run(self) -> None:
        """Takes messages in until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_clock)
            await self._listen()

    async def _watch_clock(self) -> None:
        """Wakes the pipeline when a request's time is up."""
        while True:
            left_s = self.scheduler.deadlines.next_s - monotonic()
            with anyio.move_on_after(max(left_s, 0.001)):
                await self._armed.wait()
                self._armed = anyio.Event()
                continue
            self._wake.set()

    async def _listen(self) -> None:
        while True:
            for message in await self._inbox.drain():
                match message:
                    case Arrive(request=request):
                        await self._send(self._add(request))
                    case Abort(request_id=request_id):
                        if not self.scheduler.roster.siblings(request_id):
                            self._forward(message)
                        self.scheduler.abort(request_id)
                    case Stopped(sequence_ids=ids):
                        if not all(i in self.scheduler.roster.live for i in ids):
                            self._forward(message)
                        self._meter.stopped(monotonic(), ids)
                        self.scheduler.end(ids)
                    case Pause(mode=mode):
                        pause(self.scheduler, mode)
                        self._pausing.append(message)
                        self._answer_pauses()
                    case SuspendPlanning(drops_pages=drops_pages):
                        if (busy := suspend(self.scheduler, drops_pages=drops_pages)) is not None:
                            message.answer(busy)
                        else:
                            self._pausing.append(message)
                            self._answer_pauses()
                    case ResumePlanning():
                        resume_planning(self.scheduler)
                    case Unload(adapter=adapter):
                        self.scheduler.roster.lora_slots.unload(adapter, self.scheduler.roster.live.values())
                    case Continue():
                        unpause(self.scheduler)
                        self._answer_pauses()
                    case Flush(answer=answer):
                        freed = flush(self.scheduler)
                        answer(
                            Busy(
                                "the cache is in use: sequences are running; try again when none is, or "
                                "pause generation with mode retract or abort first"
                            )
                            if freed is None
                            else freed
                        )
            self._wake.set()

    def _answer_pauses(self) -> None:
        """Answers pauses when no step is in flight any more, or when there is no pause any more."""
        is_still = not self.scheduler.num_in_flight
        if self._pausing and (is_still or not (self.scheduler.is_paused or self.scheduler.is_suspended)):
            pausing, self._pausing = self._pausing, []
            for waiting in pausing:
                if isinstance(waiting, SuspendPlanning) and waiting.drops_pages:
                    lose_pages(self.scheduler)
                waiting.answer(None)

    def _add(self, request: Request) -> Opened | Refused:
        if self.limits.cuts:  # the pages hold less than the tokenizer's limit where memory is short
            request = structs.replace(request, prompt_ids=cut(request.prompt_ids, self.limits))
        try:
            check(request.params, request.prompt_ids, self.limits)
        except InvalidRequest as error:
            return Refused(request.id, error.status, error.message, error.param)
        before_s = self.scheduler.deadlines.next_s
        ids = self.scheduler.add(request)
        if self.scheduler.deadlines.next_s < before_s:
            self._armed.set()
        self._meter.opened(request, ids)
        if self._storage is not None:
            self._storage.arrived(self.scheduler.roster.live[ids[0]])
        return Opened(request, ids)

    def adopted(self) -> None:
        """The scheduler has got requests from another one."""
        self._armed.set()
        self._wake.set()

    async def drive(self, steps: S) -> RankDied:
        """Runs steps on these ranks until one of them is lost. -> its death"""
        steps.set_wake(self._wake.set)
        self._wake.set()
        while True:
            await self._wake.wait()
            while results := steps.results():
                for result in results:
                    await self.take(result)
            if self._storage is not None:
                self._storage.saved()
            if steps.died is not None:
                return steps.died
            await self.begin_round()
            self._submit(steps)
            await self.end_round(steps)

    async def take(self, result: StepResult) -> None:
        """Takes in the result of the oldest step in flight."""
        tokens = self.scheduler.apply(result)
        self._meter.step(monotonic(), tokens, result.compute_s)
        await self._send(tokens)
        while self.scheduler.failed:
            request, failing = self.scheduler.failed.pop()
            status, message = FAILINGS[failing]
            await self._fail(request, status, message.format(id=request.request_id))

    async def begin_round(self) -> None:
        """What precedes planning: answers that are due, and requests whose time is up."""
        self._answer_pauses()
        if self.scheduler.deadlines.next_s <= monotonic():
            for refusal, ids in self.scheduler.expire(monotonic()):
                self._meter.refused(ids)
                await self._send(refusal)

    def next_plan(self) -> StepPlan | None:
        """Plans a step; None: there is nothing to compute."""
        plan = self.scheduler.plan()
        if admitted := self.scheduler.take_admitted():
            self._meter.admitted(monotonic(), admitted)
        return plan

    async def end_round(self, steps: S) -> None:
        """What follows planning: sequences that ended without a step, events, observers, and upkeep while
        there is nothing to do."""
        if not self.scheduler.num_in_flight and (ended := self.scheduler.take_ended()):
            tokens = StepTokens([], [], ended, {}, {})
            self._meter.ended(monotonic(), tokens)
            await self._send(tokens)
        self._publish_events()
        for observe in self._observers:
            observe(self.scheduler, steps)
        if self._upkeep.is_due and monotonic() - self._audited_s > AUDIT_EVERY_S:
            await self._audit()

    async def _audit(self) -> None:
        """Checks the cache while the pipeline is idle, until it is woken."""
        audit = self._upkeep.run()
        try:
            while not self._wake.is_set:
                next(audit)
                await checkpoint()
        except StopIteration as end:
            self._audited_s = monotonic()
            result: Findings = end.value
            if not result.is_clean:
                self._meter.leaked(len(result.pages) + len(result.hosts))
                self.limits = structs.replace(self.limits, pool_tokens=self.scheduler.config.pool_tokens)
                log.get("cache").error(
                    "the prefix cache was not as it should be and was emptied",
                    pages=sorted(result.pages),
                    host_pages=sorted(result.hosts),
                    findings=result.messages,
                )

    @property
    def last_step(self) -> int:
        """The latest step whose result was taken in."""
        return self.scheduler.last_step

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and whose results have not come."""
        return self.scheduler.num_in_flight

    async def lose_ranks(self, *, points_at_requests: bool = True, is_alone: bool = True) -> Lost:
        """The ranks are dead: all running requests wait. The request that killed them, where it is known and
        their death may point at one, fails. `is_alone`: no other scheduler had requests on these ranks."""
        self._unsent = None
        lost = self.scheduler.lose_ranks(points_at_requests=points_at_requests, is_alone=is_alone)
        self._answer_pauses()
        self._publish_events()
        if lost.guilty is not None:
            await self._fail(
                lost.guilty,
                500,
                "the model process ended each time it computed this request; the server's log has the "
                f"details under {lost.guilty.request_id}",
            )
        return lost

    async def resume(
        self,
        num_pages: int,
        num_host_pages: int,
        num_window_pages: int = 0,
        num_state_slots: int = 0,
        num_host_states: int = 0,
    ) -> None:
        """New ranks are ready. Requests that do not fit into their pages fail."""
        refused = self.scheduler.resume(
            num_pages, num_host_pages, num_window_pages, num_state_slots, num_host_states
        )
        self.limits = structs.replace(self.limits, pool_tokens=self.scheduler.config.pool_tokens)
        for request in refused:
            await self._fail(
                request,
                503,
                "the model was started again and has less memory than this prompt needs; try again later",
            )

    def _publish_events(self) -> None:
        journal = self.scheduler.journal
        if journal is not None and self._publish is not None and not journal.is_empty:
            self._publish(journal.take())

    async def _fail(self, request: GivenUp, status: int, message: str) -> None:
        self._meter.failed(monotonic(), request.sequence_ids)
        await self._send(Refused(request.request_id, status, message))

    def _submit(self, steps: S) -> None:
        """Plans and submits until the pipeline is full, or there is nothing to compute."""
        while True:
            if self._unsent is None:
                if self.scheduler.num_in_flight >= self.depth:
                    return
                self._unsent = self.next_plan()
            if self._unsent is None or not steps.submit(self._unsent):
                return
            self._unsent = None

    async def _send(self, message: ToDetokenizer) -> None:
        try:
            self._outbox.send_nowait(message)
        except anyio.WouldBlock:
            await self._outbox.send(message)
