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
from typing import Protocol

import anyio
from msgspec import structs

from runtime.actors.channels import Channel, Signal
from runtime.actors.scheduler_rounds import S, SchedulerRounds
from runtime.cache.journal import CacheEvents
from runtime.cache.sequence import Sequence
from runtime.errors import Busy, InvalidRequest, RankDied
from runtime.messages.media import Encode
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
from runtime.messages.steps import StepPlan
from runtime.metrics.meter import Meter
from runtime.scheduling.pausing import flush, pause, resume_planning, suspend, unpause
from runtime.scheduling.recovery import Lost
from runtime.scheduling.scheduler import Scheduler, encode_for_step

CACHE_IN_USE = (
    "the cache is in use: sequences are running; try again when none is, or pause generation with mode "
    "retract or abort first"
)


class Storage(Protocol):
    """The storage tier, as far as the scheduler actor calls it; actors/storage.py is one."""

    def sampled(self, tokens: StepTokens) -> None:
        """A step has brought tokens; called before `saved`."""
        ...

    def saved(self) -> None:
        """Pages may have come to host memory."""
        ...

    def arrived(self, sequence: Sequence) -> None:
        """A sequence waits for its turn; it may be held until its prefix has come from storage."""
        ...


class SchedulerActor(SchedulerRounds[S]):
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
        super().__init__(
            scheduler,
            outbox,
            limits=limits,
            meter=meter,
            signal=signal or Signal(),
            publish=publish,
            observers=observers,
        )
        self.depth = depth
        self._inbox = inbox
        self._forward = forward
        self._armed = anyio.Event()  # there is a new deadline
        # planned, but the ring was full: what the step needs encoded, and the step
        self._unsent: list[Encode | StepPlan] = []
        self._storage = storage

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
                if isinstance(message, Arrive):
                    await self._send(self._add(message.request))
                else:
                    self._obey(message)
            self._wake.set()

    def _obey(self, message: ToScheduler) -> None:
        """Does what a message asks for; those that bring requests are added instead."""
        scheduler = self.scheduler
        match message:
            case Abort(request_id=request_id):
                if not scheduler.roster.siblings(request_id):
                    self._forward(message)
                scheduler.abort(request_id)
            case Stopped(sequence_ids=ids):
                if not all(i in scheduler.roster.live for i in ids):
                    self._forward(message)
                self._meter.stopped(monotonic(), ids)
                scheduler.end(ids)
            case Pause(mode=mode):
                pause(scheduler, mode)
                self._pausing.append(message)
                self._answer_pauses()
            case SuspendPlanning(drops_pages=drops_pages):
                if (busy := suspend(scheduler, drops_pages=drops_pages)) is not None:
                    message.answer(busy)
                else:
                    self._pausing.append(message)
                    self._answer_pauses()
            case ResumePlanning():
                resume_planning(scheduler)
            case Unload(adapter=adapter):
                scheduler.roster.lora_slots.unload(adapter, scheduler.roster.live.values())
            case Continue():
                unpause(scheduler)
                self._answer_pauses()
            case Flush(answer=answer):
                freed = flush(scheduler)
                answer(Busy(CACHE_IN_USE) if freed is None else freed)

    def _add(self, request: Request) -> Opened | Refused:
        if self.limits.cuts and not request.media:
            # the pages hold less than the tokenizer's limit where memory is short
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
                    tokens = await self.take(result)
                    if self._storage is not None:
                        self._storage.sampled(tokens)
            if steps.died is not None:
                return steps.died
            await self.begin_round()
            self._submit(steps)
            await self.end_round(steps)

    async def begin_round(self) -> None:
        """See SchedulerRounds; storage looks at what has come to host memory."""
        if self._storage is not None:
            self._storage.saved()
        await super().begin_round()

    async def lose_ranks(self, *, points_at_requests: bool = True, is_alone: bool = True) -> Lost:
        """The ranks are dead: all running requests wait. The request that killed them, where it is known and
        their death may point at one, fails. `is_alone`: no other scheduler had requests on these ranks."""
        self._unsent = []
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

    def _submit(self, steps: S) -> None:
        """Plans and submits until the pipeline is full, or there is nothing to compute."""
        while True:
            if not self._unsent:
                if self.scheduler.num_in_flight >= self.depth:
                    return
                plan = self.next_plan()
                encode = encode_for_step(self.scheduler, plan)
                self._unsent = [one for one in (encode, plan) if one is not None]
                if not self._unsent:
                    return
            if not steps.submit(self._unsent[0]):
                return
            del self._unsent[0]
