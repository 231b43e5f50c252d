"""What a scheduler's actor does around each step: it takes in the result, answers what is due, plans the
next step, and keeps the cache in order while there is nothing to do. Who calls this, and when a plan is
submitted, is in actors/scheduler.py, and in actors/attention_groups.py where schedulers plan together.
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
from runtime.errors import RankDied
from runtime.messages.media import Encode
from runtime.messages.sampling import Limits
from runtime.messages.scheduler import Pause, Refused, StepTokens, SuspendPlanning, ToDetokenizer
from runtime.messages.steps import Failing, StepPlan, StepResult
from runtime.metrics.meter import Meter
from runtime.scheduling.pausing import lose_pages
from runtime.scheduling.recovery import GivenUp
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.upkeep import Upkeep

AUDIT_EVERY_S = 10.0  # at most, when there is nothing else to do

# status and message
FAILINGS = {
    Failing.GRAMMAR: (400, "the constraint could not be followed to its end; simplify it"),
    Failing.PROCESSOR: (500, "the logit processor failed; the server's log has the details under {id}"),
    Failing.NAN: (
        500,
        "the model computed NaN where the next token's logits should be; look at its weights and dtype "
        "(--debug-tensor-dump-output-folder shows the layer)",
    ),
}


class Steps(Protocol):
    """Where plans go and results come from; actors/ranks.py is one."""

    died: RankDied | None  # set once, when a rank is lost

    def submit(self, plan: Encode | StepPlan) -> bool:
        """Hands over a step, or what is encoded before it. False: there is no room now; try again when
        `set_wake`'s callback is called."""
        ...

    def results(self) -> list[StepResult]:
        """Results that have arrived, oldest first."""
        ...

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` is called when results have come or a rank has died."""
        ...


S = TypeVar("S", bound=Steps)


class SchedulerRounds(Generic[S]):
    """A scheduler between the messages and results that come and the plans and tokens that leave."""

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Channel[ToDetokenizer],
        *,
        limits: Limits,
        meter: Meter,
        signal: Signal,
        publish: Callable[[CacheEvents], None] | None,
        observers: Iterable[Callable[[Scheduler, S], None]],
    ) -> None:
        """See SchedulerActor."""
        self.scheduler = scheduler
        self.limits = limits
        self._outbox = outbox
        self._meter = meter
        self._wake = signal
        self._publish = publish
        self._observers = tuple(observers)
        self._upkeep = Upkeep(scheduler)
        self._audited_s = -AUDIT_EVERY_S
        self._pausing: list[Pause | SuspendPlanning] = []  # to be answered when no step is in flight

    async def take(self, result: StepResult) -> StepTokens:
        """Takes in the result of the oldest step in flight. -> its tokens"""
        tokens = self.scheduler.apply(result)
        self._meter.step(monotonic(), tokens, result.compute_s, result.encode_s)
        await self._send(tokens)
        while self.scheduler.failed:
            request, failing = self.scheduler.failed.pop()
            status, message = FAILINGS[failing]
            await self._fail(request, status, message.format(id=request.request_id))
        return tokens

    async def begin_round(self) -> None:
        """What precedes planning: answers that are due, tokens that came without a step, and requests whose
        time is up."""
        self._answer_pauses()
        early, self.scheduler.early = self.scheduler.early, []
        for tokens in early:
            self._meter.tokens(monotonic(), tokens)
            await self._send(tokens)
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

    def _answer_pauses(self) -> None:
        """Answers pauses when no step is in flight any more, or when there is no pause any more."""
        is_still = not self.scheduler.num_in_flight
        if self._pausing and (is_still or not (self.scheduler.is_paused or self.scheduler.is_suspended)):
            pausing, self._pausing = self._pausing, []
            for waiting in pausing:
                if isinstance(waiting, SuspendPlanning) and waiting.drops_pages:
                    lose_pages(self.scheduler)
                waiting.answer(None)

    def _publish_events(self) -> None:
        journal = self.scheduler.journal
        if journal is not None and self._publish is not None and not journal.is_empty:
            self._publish(journal.take())

    async def _fail(self, request: GivenUp, status: int, message: str) -> None:
        self._meter.failed(monotonic(), request.sequence_ids)
        await self._send(Refused(request.request_id, status, message))

    async def _send(self, message: ToDetokenizer) -> None:
        try:
            self._outbox.send_nowait(message)
        except anyio.WouldBlock:
            await self._outbox.send(message)
