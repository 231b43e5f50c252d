"""The scheduler actor: a thin shell of tasks around the pure Scheduler. One loop: take in results, plan ahead, submit.

At most `depth` steps are in flight. With two, step n+1 is planned and lies in the ring before step n's tokens are known, so the
ranks never wait for the event loop (the overlap scheduler of the field, as an async pipeline).
"""

from collections.abc import Callable
from time import monotonic
from typing import Protocol

import anyio
from msgspec import structs

from runtime.channels import Channel
from runtime.errors import InvalidRequest, RankDied
from runtime.messages import Abort, Arrive, Opened, Refused, StepPlan, StepResult, StepTokens, Stopped, ToDetokenizer, ToScheduler
from runtime.metrics.meter import Meter
from runtime.request import Request
from runtime.sampling import Limits, check, cut
from runtime.scheduling.scheduler import Scheduler


class Steps(Protocol):
    """Where plans go and results come from; actors/ranks.py is one."""

    died: RankDied | None  # set once, when a rank is lost

    def submit(self, plan: StepPlan) -> bool:
        """Hands the plan over, or returns False when there is no room now; `set_wake`'s callback tells when to try again."""
        ...

    def results(self) -> list[StepResult]:
        """Results that have arrived, oldest first."""
        ...

    def set_wake(self, wake: Callable[[], None]) -> None: ...


class SchedulerActor:
    """Owns the scheduler. Messages in: Arrive, Abort, Stopped. Messages out: Opened, StepTokens, Refused."""

    def __init__(self, scheduler: Scheduler, steps: Steps, inbox: Channel[ToScheduler], outbox: Channel[ToDetokenizer], *,
                 limits: Limits, depth: int, meter: Meter) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self.depth = depth
        self._steps = steps
        self._inbox = inbox
        self._outbox = outbox
        self._meter = meter
        self._wake = anyio.Event()
        self._armed = anyio.Event()  # there is a new deadline
        self._unsent: StepPlan | None = None  # planned, but the ring was full

    async def run(self) -> None:
        """Until cancelled. Raises RankDied when a rank is lost."""
        self._steps.set_wake(lambda: self._wake.set())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            tasks.start_soon(self._pipeline)
            tasks.start_soon(self._watch_clock)

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
                        await self._send(self._take_in(request))
                    case Abort(request_id=request_id):
                        self.scheduler.abort(request_id)
                    case Stopped(sequence_ids=ids):
                        self._meter.stopped(monotonic(), ids)
                        self.scheduler.end(ids)
            self._wake.set()

    def _take_in(self, request: Request) -> Opened | Refused:
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
        return Opened(request, ids)

    async def _pipeline(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            for result in self._steps.results():
                tokens = self.scheduler.apply(result)
                self._meter.step(monotonic(), tokens, result.compute_s)
                await self._send(tokens)
            if self._steps.died is not None:
                raise self._steps.died
            if self.scheduler.deadlines.next_s <= monotonic():
                for refusal, ids in self.scheduler.expire(monotonic()):
                    self._meter.refused(ids)
                    await self._send(refusal)
            self._submit()
            if not self.scheduler.num_in_flight and (ended := self.scheduler.take_ended()):
                tokens = StepTokens([], [], ended, {}, {})
                self._meter.ended(monotonic(), tokens)
                await self._send(tokens)

    def _submit(self) -> None:
        """Plans and submits until the pipeline is full, or there is nothing to compute."""
        while True:
            if self._unsent is None:
                if self.scheduler.num_in_flight >= self.depth:
                    return
                self._unsent = self.scheduler.plan()
                if admitted := self.scheduler.take_admitted():
                    self._meter.admitted(monotonic(), admitted)
            if self._unsent is None or not self._steps.submit(self._unsent):
                return
            self._unsent = None

    async def _send(self, message: ToDetokenizer) -> None:
        try:
            self._outbox.send_nowait(message)
        except anyio.WouldBlock:
            await self._outbox.send(message)
