"""A replica: what exists once for each scheduler. The text actors exist once and serve all replicas.

dispatcher ──Arrive──► inbox ──► scheduler actor ──StepPlan──► ranks
                                   │    └──StepTokens──► outbox (the detokenizer, shared by all replicas)
                                   └── storage tier, cache events, graph captures
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import TypeVar

import anyio
from anyio.abc import TaskStatus

from runtime import log
from runtime.actors.attention_groups import AttentionGroups
from runtime.actors.channels import Channel, Signal
from runtime.actors.events import EventsActor
from runtime.actors.graph_captures import GraphCapturing
from runtime.actors.rank_commands import RankCommands
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.ranks import Ranks
from runtime.actors.replica_nodes import ReplicaNodes
from runtime.actors.saved_parts import take_saved_parts
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.storage import StorageActor, open_storage
from runtime.actors.supervisor import Driver, Supervisor
from runtime.cache.journal import Journal
from runtime.cache.media_keys import cache_ids
from runtime.errors import InvalidRequest, RankDied, StartError
from runtime.messages.lora import AdapterSetup
from runtime.messages.ranks import LoadProgress, StartRank
from runtime.messages.requests import Request
from runtime.messages.scheduler import Abort, Stopped, ToDetokenizer, ToScheduler
from runtime.metrics import Metrics
from runtime.metrics.heartbeat import StepLog
from runtime.metrics.meter import Meter
from runtime.models.config.model_config import ModelConfig
from runtime.options.captures import capture_sizes
from runtime.options.facts import device_facts
from runtime.options.plan import Plan
from runtime.scheduling.graph_captures import Captures
from runtime.scheduling.handover import fits, hand_over
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.speculation.drafter import open_drafter
from runtime.service import Load
from runtime.settings import limits, scheduler_config, start_rank
from runtime.transfer.fetches import PageFetches
from runtime.transfer.halves import Halves
from runtime.transfer.open_fetches import open_fetches

T = TypeVar("T")


def schedulers(replicas: Sequence["Replica"]) -> list[Scheduler]:
    """The schedulers of those replicas whose ranks are ready."""
    return [one.scheduler for one in replicas if one.scheduler is not None]


def of_group(plan: Plan, index: int, each: Sequence[T]) -> list[T]:
    """Selects from `each`, which has one entry for every rank of a replica in their order or none at all, the
    entries of the ranks of attention group `index` in all stages."""
    layout = plan.parallel.attention_layout
    if layout.num_groups == 1:
        return list(each)
    own = layout.group_ranks()[index]
    return [one for rank, one in enumerate(each) if rank % layout.num_ranks in own]


def descriptors(plan: Plan, index: int, setup: StartRank) -> tuple[list[int], list[int]]:
    """The file descriptors of the host memory of an attention group's ranks: of pages, and of states."""
    return of_group(plan, index, setup.host_fds), of_group(plan, index, setup.state_fds)


class Replica:
    """A scheduler with its ranks, storage tier, cache events and graph captures. `scheduler` is None until
    the ranks are ready."""

    def __init__(
        self,
        plan: Plan,
        model: ModelConfig,
        *,
        index: int,
        num_replicas: int,
        inbox: Channel[ToScheduler],
        processes: RankProcesses | None,
        nodes: ReplicaNodes | None,
        halves: Halves | None,
        outbox: Channel[ToDetokenizer],
        metrics: Metrics,
        adapters: Callable[[], AdapterSetup] | None,
        on_death: Callable[[RankDied], None],
        on_progress: Callable[[LoadProgress], None],
        on_lost: Callable[["Replica"], None],
        on_resumed: Callable[[], None],
        forward: Callable[[Abort | Stopped, int], None],
        lead: "Replica | None" = None,
    ) -> None:
        """`index` counts from 0; `inbox` is this replica's alone, `outbox` is shared; `processes`: the ranks'
        first ones, if they have been started; `nodes`: the other nodes that have ranks of it, if any do;
        `halves`: with --disaggregation-mode; `adapters` gives what new ranks must know of adapters;
        `on_death` is called for each death of a rank, `on_progress` as ranks start, `on_lost` when all
        requests wait for new ranks, `on_resumed` when these take steps; `forward` gets messages about
        requests that are not here, and this replica's index. `lead`: the replica of the first attention
        group, whose ranks this one, of another group, shares; None: it has ranks of its own."""
        self.index = index
        self.inbox = inbox
        self.scheduler: Scheduler | None = None
        self._lead = lead
        self._members: list[Replica] = []  # of the other attention groups
        self._are_ranks_ready = anyio.Event()
        self._is_open = anyio.Event()  # there is a scheduler
        if lead is None:
            self._signal = Signal()
            self.supervisor = Supervisor(
                start_rank(plan, model, None if adapters is None else adapters(), replica=index),
                metrics,
                watchdog_s=plan.schedule.watchdog_timeout,
                soft_watchdog_s=plan.schedule.soft_watchdog_timeout or 0.0,
                num_standby=plan.parallel.standby_ranks,
                processes=processes,
                nodes=nodes,
                adapters=adapters,
                on_death=on_death,
                on_progress=on_progress,
                on_lost=partial(on_lost, self),
                on_resumed=on_resumed,
            )
            self.commands = RankCommands(self.supervisor)
        else:
            self._signal, self.supervisor, self.commands = lead._signal, lead.supervisor, lead.commands
            lead._members.append(self)
        self.storage: StorageActor | None = None  # with --hicache-storage-backend
        self.pages: PageFetches | None = None  # with --disaggregation-mode
        self._halves = halves
        self.events: EventsActor | None = None  # with --kv-events-config
        self._plan = plan
        self._model = model
        self._num_replicas = num_replicas
        self._outbox = outbox
        self._metrics = metrics
        self.meter = Meter(metrics)
        self._forward = lambda message: forward(message, index)
        self._actor: SchedulerActor[Ranks] | None = None  # with `scheduler`

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Starts the ranks, then serves until cancelled. Raises StartError, RankDied."""
        plan, supervisor = self._plan, self.supervisor
        if plan.observe.kv_events_config is not None and plan.observe.kv_events_config.is_on:
            self.events = EventsActor(plan.observe.kv_events_config, self._metrics, replica=self.index)
        async with anyio.create_task_group() as tasks:
            if self.events is not None:
                tasks.start_soon(self.events.run)
            await self._start_ranks()
            scheduler = self._open_scheduler()
            if plan.tiers.hicache_storage_backend is not None:
                self.storage = await open_storage(
                    plan,
                    self._model,
                    scheduler,
                    of_group(plan, self.index, supervisor.open_hosts()),
                    of_group(plan, self.index, supervisor.open_host_states()),
                    self._signal.set,
                )
                tasks.start_soon(self.storage.run)
            if self._halves is not None:
                self.pages = await open_fetches(
                    plan,
                    self._model,
                    scheduler,
                    of_group(plan, self.index, supervisor.open_hosts()),
                    of_group(plan, self.index, supervisor.open_host_states()),
                    descriptors(plan, self.index, supervisor.setup),
                    self._halves,
                    self._signal.set,
                )
                tasks.start_soon(self.pages.run)
            actor = SchedulerActor[Ranks](
                scheduler,
                self.inbox,
                self._outbox,
                meter=self.meter,
                limits=limits(plan, self._model, scheduler.config.pool_tokens),
                depth=plan.steps_in_flight,
                signal=self._signal,
                storage=self.storage or self.pages,
                publish=None if self.events is None else self.events.offer,
                observers=self._observers(),
                forward=self._forward,
            )
            self.scheduler, self._actor = scheduler, actor
            tasks.start_soon(actor.run)
            self._is_open.set()
            task_status.started()
            if self._lead is not None:
                await anyio.sleep_forever()  # the lead runs its steps
            tasks.start_soon(supervisor.standby.run)
            driver: Driver = actor  # plans steps for these ranks
            if self._members:
                for member in self._members:
                    await member._is_open.wait()
                actors = [one._actor for one in (self, *self._members) if one._actor is not None]
                driver = AttentionGroups(actors, self._signal, plan.steps_in_flight)
            await supervisor.run(driver)

    async def _start_ranks(self) -> None:
        """Starts the ranks, or waits for those that it shares. Raises StartError, RankDied."""
        if self._lead is not None:
            return await self._lead._are_ranks_ready.wait()
        await self.supervisor.start()
        self._log_start()
        self._are_ranks_ready.set()

    async def stop(self, within_s: float = inf) -> None:
        """Ends the ranks and closes what is open. For the owner, when `run` has ended."""
        if self.owns_ranks:
            await self.supervisor.stop(within_s)
        if self.events is not None:
            self.events.close()
        self.inbox.discard()

    @property
    def owns_ranks(self) -> bool:
        """Whether these are not the ranks of another replica."""
        return self._lead is None

    @property
    def num_steps(self) -> int:
        """Steps that were planned since the start."""
        return 0 if self.scheduler is None else self.scheduler.totals.steps

    @property
    def is_taking(self) -> bool:
        """Whether its ranks run: none is while they start or are started again."""
        return self.scheduler is not None and not self.supervisor.is_recovering

    @property
    def answers(self) -> tuple[int, int]:
        """Tokens of answers that it has generated, and the number of answers that have ended."""
        return (
            (0, 0) if self.scheduler is None else (self.scheduler.generated_tokens, self.scheduler.num_ended)
        )

    def cached_len(self, request: Request) -> int:
        """Tokens of a prompt that the prefix cache has, in whole pages."""
        if self.scheduler is None:
            return 0
        tree = self.scheduler.cache.tree
        ids = cache_ids(request)
        return tree.probe(None, request.namespace, ids, len(ids) // tree.page_size).depth * tree.page_size

    def hand_over(self, request_id: str, target: "Replica") -> bool:
        """Gives a request of which nothing runs to another replica, whose ranks run. False: it has no room
        for it."""
        source, destination = self.scheduler, target.scheduler
        if source is None or destination is None or not fits(source, destination, request_id):
            return False
        moved = hand_over(source, destination, request_id)
        self.meter.move([sequence.id for sequence in moved], target.meter)
        if target._actor is not None:
            target._actor.adopted()
        return True

    def has_request(self, request_id: str) -> bool:
        """Whether the scheduler knows the request."""
        return self.scheduler is not None and bool(self.scheduler.roster.siblings(request_id))

    async def clear_storage(self) -> int:
        """Deletes all pages of this model from storage. -> how many. Raises InvalidRequest without a storage
        tier."""
        if self.storage is None:
            raise InvalidRequest("this server has no storage tier (--hicache-storage-backend)")
        return await self.storage.clear()

    def load(self) -> Load:
        """How busy the replica is now; without pages and sequences while it loads."""
        if (scheduler := self.scheduler) is None:
            return Load(page_size=self._plan.memory.page_size)
        readies = of_group(self._plan, self.index, self.supervisor.readies)
        roster, cache, window, totals = (
            scheduler.roster,
            scheduler.cache,
            scheduler.cache.window,
            scheduler.totals,
        )
        return Load(
            running=roster.num_running,
            waiting=len(roster.waiting),
            used_pages=cache.num_used,
            cached_pages=cache.tree.num_evictable,
            total_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            used_host_pages=cache.host.num_used,
            total_host_pages=cache.tree.hosts.num_pages,
            used_window_pages=window.pool.num_used if window else 0,
            cached_window_pages=window.num_evictable if window else 0,
            total_window_pages=window.pool.num_pages if window else 0,
            steps=totals.steps,
            tokens_per_s=self.meter.tokens_per_s(monotonic()),
            max_running=roster.max_running,
            waiting_tokens=roster.waiting.num_tokens,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            verified_rows=totals.verified_rows,
            drafted_tokens=totals.drafted_tokens,
            accepted_drafts=totals.accepted_drafts,
            weights_bytes=sum(ready.weights_bytes for ready in readies),
            pages_bytes=sum(ready.pages_bytes for ready in readies),
        )

    def _open_scheduler(self) -> Scheduler:
        """Raises StartError when the host tier got no memory."""
        supervisor = self.supervisor
        if self._plan.tiers.enable_hierarchical_cache and supervisor.sizes[1] < 2:
            raise StartError("there is no room for host pages; raise --hicache-size or --hicache-ratio")
        config = scheduler_config(
            self._plan, self._model, *supervisor.sizes, replica=self.index, num_replicas=self._num_replicas
        )
        if notice := self._plan.memory.pool_notice(config.pool_tokens):
            log.get("options").warning(notice)
        journal = None if self.events is None else Journal(config.page_size)
        facts = device_facts(self._plan.parallel.device)
        has_trees = facts.has_tree_attention and not self._model.num_recurrent_layers
        drafter = open_drafter(self._plan.speculation.in_force, has_trees=has_trees)
        scheduler = Scheduler(config, journal, self.meter.delayed, drafter)
        # until MemorySaver has got them
        scheduler.is_suspended = self._plan.weights.checkpoint_engine_wait_weights_before_ready
        return scheduler

    def _observers(self) -> list[Callable[[Scheduler, Ranks], None]]:
        """Functions that see the scheduler after each round."""
        plan = self._plan
        observers: list[Callable[[Scheduler, Ranks], None]] = []
        kinds = capture_sizes(plan, self._model) if self.owns_ranks else {}
        if captures := [Captures(sizes, unit) for unit, sizes in kinds.items() if sizes]:
            observers.append(
                GraphCapturing(captures, self._metrics, partial(schedulers, self._members)).observe
            )
        if plan.logs.decode_log_interval is not None:
            fields = {"replica": self.index} if self._num_replicas > 1 else {}
            observers.append(StepLog(plan.logs.decode_log_interval, self.load, fields).observe)
        if self.pages is not None:
            group = self.index if plan.parallel.attention_layout.num_groups > 1 else 0
            observers.append(partial(take_saved_parts, self.pages, group))
        return observers

    def _log_start(self) -> None:
        """Lines about how long the ranks' phases took."""
        for ready in self.supervisor.readies:
            for phase, seconds in ready.phases_s.items():
                log.get("start").info(phase, rank=ready.rank, seconds=round(seconds, 3))
