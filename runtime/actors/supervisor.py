"""One generation of ranks after the other: when ranks die, new ones are started and the requests go on.

    start ──► serve ──► a rank died ──► all requests wait ──► stop other ranks ──► start next generation
                ▲                     (Scheduler.lose_ranks)                          │ (Scheduler.resume)
                └─────────────────────────────────────────────────────────────────────┘

Deaths with steps in flight are bounded by what scheduling/suspects.py proves: in the end a request fails.
What other deaths mean is in actors/deaths.py: ranks that fail by themselves again and again end the server,
ranks that are killed are started again for as long as it takes. A rank that hangs is found by the watchdog
(actors/watchdog.py): it dumps its stack to the log, and counts as dead. Standby ranks (actors/standby.py)
make the next generation start sooner.

When ranks die while some of their memory is released, no request waits for them: the next generation starts
when everything is to be resumed.
"""

import os
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from time import monotonic
from typing import NoReturn

import anyio
from msgspec import structs

from runtime import log
from runtime.actors.attention_groups import AttentionGroups
from runtime.actors.death_reports import DeathReports
from runtime.actors.deaths import STABLE_S, Deaths
from runtime.actors.fork_server import open_fork_server
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.ranks import Ranks
from runtime.actors.replica_nodes import ReplicaNodes
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.standby import StandbyRanks
from runtime.actors.watchdog import watch, watch_softly
from runtime.devices.host_memory import HostPages
from runtime.errors import RankDied, SpawnError
from runtime.messages.experts import Placement
from runtime.messages.lora import AdapterSetup
from runtime.messages.memory import MemoryReport, Part, in_order
from runtime.messages.ranks import LoadProgress, RankReady, StartRank
from runtime.metrics import Metrics

Driver = SchedulerActor[Ranks] | AttentionGroups  # runs steps on ranks
MEMORY = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING  # sealed where other servers map it (transfer/mapped.py)


class SleepState:
    """Which parts of the ranks' memory are released; and, when the ranks have died meanwhile, that new ones
    start only when everything is resumed."""

    def __init__(self) -> None:
        self.released: tuple[Part, ...] = ()
        self.is_asleep = False
        self._wanted = anyio.Event()
        self._over = anyio.Event()

    async def sleep(self) -> None:
        """Returns when everything is to be resumed."""
        self.is_asleep, self._wanted, self._over = True, anyio.Event(), anyio.Event()
        await self._wanted.wait()
        self.is_asleep = False

    async def wake(self) -> None:
        """Resumes everything. Returns when new ranks are ready, or there will be none."""
        self.released = ()
        self._wanted.set()
        await self._over.wait()

    def end(self) -> None:
        """New ranks are ready, or there will be none."""
        self._over.set()


class Supervisor:
    """Owns the ranks of one replica. `ranks` is the current generation; while `is_recovering` it takes no
    steps."""

    def __init__(
        self,
        start: StartRank,
        metrics: Metrics,
        *,
        watchdog_s: float,
        soft_watchdog_s: float = 0.0,
        num_standby: int = 0,
        processes: RankProcesses | None = None,
        nodes: ReplicaNodes | None = None,
        adapters: Callable[[], AdapterSetup] | None = None,
        on_death: Callable[[RankDied], None] = lambda died: None,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        on_lost: Callable[[], None] = lambda: None,
        on_resumed: Callable[[], None] = lambda: None,
    ) -> None:
        """`watchdog_s` 0: no watchdog; `soft_watchdog_s` 0: no soft one; `num_standby`: sets of standby
        ranks; `processes`: those of the first generation, if they have been started; `nodes`: the other
        nodes, if there are any; `adapters` gives the adapters that new ranks must load; `on_death` is called
        for each death, before the other ranks are stopped; `on_progress` as ranks start, until each is ready;
        `on_lost` when, after a death, all requests of the scheduler wait for new ranks, `on_resumed` when
        these take steps."""
        self.forks = open_fork_server(start.device, num_standby) if processes is None else processes.forks
        self.ranks = Ranks(start, processes=processes, forks=self.forks, nodes=nodes)
        self.standby = StandbyRanks(num_standby, self._make_ranks)
        self.readies: list[RankReady] = []
        self.is_recovering = False
        self.is_node_lost = False  # the last ranks that died did so with their node
        self.sleep_state = SleepState()
        self.setup = start  # what new ranks are started with
        self._nodes = nodes
        self._adapters = adapters
        self._on_progress = on_progress
        self._on_lost = on_lost
        self._on_resumed = on_resumed
        self._metrics = metrics
        self._watchdog_s = watchdog_s
        self._soft_watchdog_s = soft_watchdog_s
        self._reports = DeathReports(on_death)
        self._deaths = Deaths()
        self._generations = count(2)
        self._ready_s = 0.0  # when the current ranks were ready
        self._log = log.get("ranks")

    @property
    def generation(self) -> int:
        """Number of the current generation; later ones have higher numbers."""
        return self.ranks.generation

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """What all ranks have room for, padding included, the least that any of them reported: pages,
        pages in host memory, sliding-window pages (0: all layers share one pool), state slots of recurrent
        layers (0: the model has none), states in host memory."""
        num_pages, num_hosts, num_windows, num_states, num_host_states = (
            min(sizes)
            for sizes in zip(
                *(
                    (
                        ready.num_pages,
                        ready.num_host_pages,
                        ready.num_window_pages,
                        ready.num_state_slots,
                        ready.num_host_states,
                    )
                    for ready in self.readies
                ),
                strict=True,
            )
        )
        return num_pages, num_hosts, num_windows, num_states, num_host_states

    async def start(self) -> None:
        """Starts ranks for the first time. Raises StartError, RankDied, NodeGone."""
        if self.setup.host_bytes or self.setup.host_ratio:
            host_fds, state_fds = (
                [os.memfd_create(f"{what}-{i}", MEMORY) for i in range(self.setup.num_ranks)]
                for what in ("host", "states")
            )
            self.setup = structs.replace(self.setup, host_fds=host_fds, state_fds=state_fds)
            self.ranks = Ranks(self.setup, forks=self.forks)
        await self._start_ranks()

    async def run(self, actor: Driver) -> NoReturn:
        """Serves and recovers until cancelled. Raises RankDied when recovery was in vain too often,
        StartError when ranks cannot start, NodeGone when another node does not come back."""
        while True:
            last_step = actor.scheduler.last_step
            died = self._reports.explain(await self._serve(actor))
            begin = monotonic()
            self.is_recovering, self.is_node_lost = True, died.is_with_node
            lost = await actor.lose_ranks(points_at_requests=not died.is_with_node)
            self._on_lost()
            self._reports.report(died, self.generation, lost.num_steps)
            if lost.guilty is not None:
                self._log.error("a request kills the ranks and was given up", request=lost.guilty.request_id)
            if actor.scheduler.last_step > last_step or begin - self._ready_s >= STABLE_S:
                self._deaths.clear()
            if not lost.num_steps:
                self._deaths.add(died)
            if self._deaths.are_final:
                raise died
            await self._replace_ranks()
            await self._start_ranks()
            await actor.resume(*self.sizes)
            self._metrics.recovered_requests.add(lost.num_requests)
            self.is_recovering = False
            self.sleep_state.end()
            self._log.warning(
                "ranks restarted",
                generation=self.generation,
                requests=lost.num_requests,
                seconds=round(monotonic() - begin, 3),
            )
            self._on_resumed()

    def open_hosts(self) -> list[HostPages]:
        """The host memory of each rank, mapped here; empty without a host tier. Ranks must be ready."""
        return [
            HostPages(fd, ready.num_host_pages, ready.host_part_bytes, self.setup.host_layout)
            for fd, ready in zip(self.setup.host_fds, self.readies, strict=bool(self.setup.host_fds))
        ]

    def open_host_states(self) -> list[HostPages]:
        """The host memory for states of recurrent layers of each rank, mapped here, each state a page of one
        part; empty without any. Ranks must be ready."""
        return [
            HostPages(fd, num_states, (os.fstat(fd).st_size // num_states,), "page_first")
            for fd, ready in zip(self.setup.state_fds, self.readies, strict=bool(self.setup.state_fds))
            if (num_states := ready.num_host_states)
        ]

    def memory_changed(self, reports: Sequence[MemoryReport]) -> None:
        """All ranks have reported what they hold now."""
        self.sleep_state.released = in_order({part for report in reports for part in report.released})
        by_rank = {report.rank: report for report in reports}
        self.readies = [
            structs.replace(
                ready,
                weights_bytes=by_rank[ready.rank].weights_bytes,
                pages_bytes=by_rank[ready.rank].pages_bytes,
                used_bytes=by_rank[ready.rank].used_bytes,
            )
            for ready in self.readies
        ]

    def weights_changed(self, model_path: str, load_format: str) -> None:
        """Ranks that start from now on load these weights."""
        self.setup = structs.replace(self.setup, model_path=model_path, load_format=load_format)

    def experts_moved(self, layers: dict[int, Placement]) -> None:
        """Ranks that start from now on have the experts of these layers so."""
        assert self.setup.expert_places is not None, "experts that move have places"
        places = structs.replace(self.setup.expert_places, layers=self.setup.expert_places.layers | layers)
        self.setup = structs.replace(self.setup, expert_places=places)

    async def stop(self, within_s: float = inf) -> None:
        """Ends the ranks; host memory is freed when no process maps it any more."""
        self.sleep_state.end()
        await self.standby.stop(within_s)
        await self.ranks.stop(within_s)
        if self.forks is not None:
            self.forks.close()
        for fd in (*self.setup.host_fds, *self.setup.state_fds):
            os.close(fd)
        self.setup = structs.replace(self.setup, host_fds=[], state_fds=[])

    async def _serve(self, actor: Driver) -> RankDied:
        """Runs steps on this generation. -> the death that ended it"""
        ranks = self.ranks
        async with anyio.create_task_group() as tasks:
            if self._watchdog_s:
                tasks.start_soon(watch, actor.scheduler, self._watchdog_s, ranks.abandon)
            if self._soft_watchdog_s:
                tasks.start_soon(watch_softly, actor.scheduler, self._soft_watchdog_s, ranks.dump_stacks)
            died = await actor.drive(ranks)
            tasks.cancel_scope.cancel()
        return died

    def _make_ranks(self) -> Ranks:
        """Ranks of the next generation."""
        generation = next(self._generations)
        return Ranks(self.setup, generation=generation, forks=self.forks, nodes=self._nodes)

    async def _start_ranks(self) -> None:
        """Starts ranks, generation after generation, until some are ready. Raises RankDied when they failed
        too often, StartError."""
        while True:
            try:
                self.readies = await self.ranks.start(self._on_progress, self.setup)
                self._ready_s = monotonic()
                return
            except SpawnError as error:
                if not self._ready_s:
                    raise
                self._log.error("no ranks can be started now", reason=str(error))
                self._deaths.num_kills += 1
            except RankDied as again:
                died = self._reports.explain(again)
                # a model for which there was never enough memory is killed each time
                self._deaths.add(died, points_at_model=died.is_for_memory and not self._ready_s)
                self._reports.report(died, self.generation, 0)
                if self._deaths.are_final:
                    raise died from None
            await self._replace_ranks()

    async def _replace_ranks(self) -> None:
        """Stops the ranks, and makes those of the next generation, when they are to be started."""
        await self.ranks.stop()
        if self.sleep_state.released:
            self.readies = [
                structs.replace(ready, weights_bytes=0, pages_bytes=0, used_bytes=0) for ready in self.readies
            ]
            self._log.warning(
                "the ranks are not started again before their memory is resumed",
                released=self.sleep_state.released,
            )
            await self.sleep_state.sleep()
        if pause_s := self._deaths.pause_s:
            self._log.warning(
                "ranks were killed several times in a row; they are started again after a pause",
                kills=self._deaths.num_kills,
                pause_s=pause_s,
            )
            await anyio.sleep(pause_s)
        if self._adapters is not None:
            self.setup = structs.replace(self.setup, adapters=self._adapters())
        self.ranks = self.standby.take() or self._make_ranks()
        self._metrics.rank_restarts.add(1)
