"""One generation of ranks after the other: when ranks die, new ones are started and the requests go on.

    start ──► serve ──► a rank died ──► everybody waits again ──► stop the others ──► start the next generation ──► serve ...
                ▲                       (Scheduler.lose_ranks)                           │ (Scheduler.resume)
                └────────────────────────────────────────────────────────────────────────┘

Deaths with steps in flight are bounded by what scheduling/suspects.py proves: in the end a request fails.
Ranks that die for no request's sake, with no step in flight or while they start, are started again until that
has happened MAX_IN_VAIN times with no step done in between. A rank that hangs is found by the watchdog: it
dumps its stack to the log, and counts as dead.

Ranks that die while some of their memory is given back hold nothing any more, and nobody waits for them: the
next generation starts when everything is to be held again.
"""

import os
from collections.abc import Callable
from time import monotonic
from typing import NoReturn

import anyio
from msgspec import structs

from runtime import log
from runtime.actors.ranks import Ranks
from runtime.actors.scheduler import SchedulerActor
from runtime.devices.host_memory import HostPages
from runtime.errors import InvalidRequest, RankDied, Unavailable
from runtime.messages.constraint import Grammar
from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.memory import Part
from runtime.messages.ranks import (
    CountExperts,
    ExpertCounts,
    LoadProgress,
    PrepareGrammar,
    RankReady,
    StartRank,
)
from runtime.metrics import Metrics
from runtime.scheduling.scheduler import Scheduler

MAX_IN_VAIN = 3
LOOKS = 8  # of the watchdog within its time limit


class Watchdog:
    """Says when a step has been in flight for `limit_s` and none was done."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._last_step = -1
        self._since_s = 0.0

    def is_stuck(self, now_s: float, scheduler: Scheduler) -> bool:
        """To be asked from time to time."""
        if scheduler.last_step != self._last_step or not scheduler.num_in_flight:
            self._last_step, self._since_s = scheduler.last_step, now_s
        return now_s - self._since_s >= self.limit_s


class SleepState:
    """What the ranks do not hold now; and, when they have died, that nobody is to start new ones until
    everything is wanted again."""

    def __init__(self) -> None:
        self.released: tuple[Part, ...] = ()
        self.is_asleep = False
        self._wanted = anyio.Event()
        self._over = anyio.Event()

    async def sleep(self) -> None:
        """Returns when everything is wanted."""
        self.is_asleep, self._wanted, self._over = True, anyio.Event(), anyio.Event()
        await self._wanted.wait()
        self.is_asleep = False

    async def wake(self) -> None:
        """Everything is wanted. Returns when new ranks are there, or there will be none."""
        self.released = ()
        self._wanted.set()
        await self._over.wait()

    def end(self) -> None:
        self._over.set()


class Supervisor:
    """Owns the ranks. `ranks` is the current generation; while `is_recovering` it takes no steps."""

    def __init__(
        self,
        start: StartRank,
        metrics: Metrics,
        watchdog_s: float,
        peek_s: float = 0.0,
        adapters: Callable[[], AdapterSetup] | None = None,
    ) -> None:
        """`adapters`: those that new ranks must have. `watchdog_s` 0: no watchdog; `peek_s` 0: no soft one,
        which only has the stacks written to the log."""
        self.generation = 1
        self.ranks = Ranks(start)
        self.readies: list[RankReady] = []
        self.is_recovering = False
        self.sleep_state = SleepState()
        self.setup = start  # what new ranks are told
        self._adapters = adapters
        self._metrics = metrics
        self._watchdog_s = watchdog_s
        self._peek_s = peek_s
        self.on_death: Callable[[RankDied], None] = lambda died: None  # told before the others are stopped
        self._log = log.get("ranks")

    @property
    def num_pages(self) -> int:
        """What the smallest rank holds, padding page included."""
        return min(ready.num_pages for ready in self.readies)

    @property
    def num_window_pages(self) -> int:
        """Of the smallest rank, padding page included; 0: all layers share the same pages."""
        return min(ready.num_window_pages for ready in self.readies)

    @property
    def num_state_slots(self) -> int:
        """Of the smallest rank, padding slot included; 0: the model has no recurrent layers."""
        return min(ready.num_state_slots for ready in self.readies)

    @property
    def num_host_pages(self) -> int:
        """In the host memory of every rank."""
        return min(ready.num_host_pages for ready in self.readies)

    async def start(self) -> None:
        """Starts the first generation. Raises StartError, RankDied."""
        if self.setup.host_bytes or self.setup.host_ratio:
            self.setup = structs.replace(
                self.setup, host_fds=[os.memfd_create(f"host-{i}") for i in range(self.setup.tp_size)]
            )
            self.ranks = Ranks(self.setup)
        self.readies = await self.ranks.start(_report)

    async def run(self, actor: SchedulerActor) -> NoReturn:
        """Serves and recovers until cancelled. Raises RankDied when that was in vain too often, StartError
        when ranks cannot start."""
        in_vain = 0
        while True:
            last_step = actor.scheduler.last_step
            died = await self._serve(actor)
            begin = monotonic()
            self.is_recovering = True
            lost = await actor.lose_ranks()
            self._tell(died, lost.num_steps)
            if lost.guilty is not None:
                self._log.error("a request kills the ranks and was given up", request=lost.guilty.request_id)
            if actor.scheduler.last_step > last_step:
                in_vain = 0
            in_vain = await self._start_again(died, in_vain + (not lost.num_steps))
            await actor.resume(
                self.num_pages, self.num_host_pages, self.num_window_pages, self.num_state_slots
            )
            self._metrics.recovered_requests.add(lost.num_requests)
            self.is_recovering = False
            self.sleep_state.end()
            self._log.warning(
                "ranks restarted",
                generation=self.generation,
                requests=lost.num_requests,
                seconds=round(monotonic() - begin, 3),
            )

    def prepare(self, grammar: Grammar | None) -> None:
        """A hint, which is lost where the ranks cannot take it now: a grammar that comes unprepared is
        compiled in its first step."""
        if self.readies and not self.is_recovering and self.ranks.died is None:
            self.ranks.submit(PrepareGrammar(grammar))

    async def load_adapter(self, load: LoadAdapter) -> None:
        """On all ranks. Raises InvalidRequest for one that they cannot read, Unavailable."""
        if (
            not self.readies
            or self.is_recovering
            or self.ranks.adapters.is_over
            or not self.ranks.submit(load)
        ):
            raise Unavailable("the ranks cannot be told now; try again in a moment")
        for answer in await self.ranks.adapters.wait(load.id):
            if answer.error:
                raise InvalidRequest(answer.error, param="lora_path")

    def open_hosts(self) -> list[HostPages]:
        """The host memory of each rank, mapped here; empty without a host tier. Ranks must be ready."""
        return [
            HostPages(fd, ready.num_host_pages, ready.host_part_bytes, self.setup.host_layout)
            for fd, ready in zip(self.setup.host_fds, self.readies, strict=bool(self.setup.host_fds))
        ]

    async def stop(self) -> None:
        """Ends the ranks; host memory goes when nobody maps it any more."""
        self.sleep_state.end()
        await self.ranks.stop()
        for fd in self.setup.host_fds:
            os.close(fd)
        self.setup = structs.replace(self.setup, host_fds=[])

    async def _serve(self, actor: SchedulerActor) -> RankDied:
        async with anyio.create_task_group() as tasks:
            if self._watchdog_s:
                tasks.start_soon(self._watch, actor.scheduler)
            if self._peek_s:
                tasks.start_soon(self._peek, actor.scheduler)
            died = await actor.drive(self.ranks)
            tasks.cancel_scope.cancel()
        return died

    async def _watch(self, scheduler: Scheduler) -> None:
        watchdog = Watchdog(self._watchdog_s)
        while not watchdog.is_stuck(monotonic(), scheduler):
            await anyio.sleep(self._watchdog_s / LOOKS)
        await self.ranks.abandon(
            f"no step was done in {self._watchdog_s:g} s (--watchdog-timeout); its stack is in the log"
        )

    async def _peek(self, scheduler: Scheduler) -> None:
        """The soft watchdog: once for each step that takes so long."""
        watchdog, told = Watchdog(self._peek_s), -1
        while True:
            await anyio.sleep(self._peek_s / LOOKS)
            if watchdog.is_stuck(monotonic(), scheduler) and scheduler.last_step != told:
                told = scheduler.last_step
                self._log.warning(
                    "no step was done for a while (--soft-watchdog-timeout); stacks follow",
                    seconds=self._peek_s,
                    last_step=told,
                    steps_in_flight=scheduler.num_in_flight,
                )
                self.ranks.dump_stacks()

    async def _start_again(self, died: RankDied, in_vain: int) -> int:
        """The next generation that gets ready. -> how often in a row ranks have died in vain"""
        while in_vain < MAX_IN_VAIN:
            await self.ranks.stop()
            if self.sleep_state.released:
                self.readies = [
                    structs.replace(ready, weights_bytes=0, pages_bytes=0, taken_bytes=0)
                    for ready in self.readies
                ]
                self._log.warning(
                    "the ranks are not started again before their memory is taken again",
                    released=self.sleep_state.released,
                )
                await self.sleep_state.sleep()
            self.generation += 1
            if self._adapters is not None:
                self.setup = structs.replace(self.setup, adapters=self._adapters())
            self.ranks = Ranks(self.setup, generation=self.generation)
            self._metrics.rank_restarts.add(1)
            try:
                self.readies = await self.ranks.start(_report)
                return in_vain
            except RankDied as again:
                died, in_vain = again, in_vain + 1
                self._tell(died, 0)
        raise died

    def _tell(self, died: RankDied, num_steps: int) -> None:
        self.on_death(died)
        self._log.error(
            "a rank died",
            rank=died.rank,
            exit_code=died.exit_code,
            generation=self.generation,
            steps=num_steps,
            reason=died.reason or "it said nothing",
        )


def _report(progress: LoadProgress) -> None:
    log.get("start").debug(
        "loading", rank=progress.rank, phase=progress.phase, fraction=round(progress.fraction, 2)
    )


async def count_experts(supervisor: Supervisor, question: CountExperts) -> ExpertCounts:
    """What its ranks say. Raises Unavailable."""
    ranks = supervisor.ranks
    if (
        not supervisor.readies
        or supervisor.is_recovering
        or ranks.died is not None
        or not ranks.submit(question)
    ):
        raise Unavailable("the ranks cannot be asked now; try again in a moment")
    return await ranks.counts.take(question.id)
