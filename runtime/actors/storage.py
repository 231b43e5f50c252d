"""The storage actor: pages are written from host memory to storage once they are saved there, and fetched
back before a request is admitted.

    scheduler actor ── saved() after each result ──► queue ──► writers (threads) ──► Store
                    ── arrived(sequence) ──────────► look up ──► readers (threads) ──► prefix tree
                       ◄──────── wake() ──────────── the sequence may be admitted, and finds its pages there

It lives on the event loop; only reads and writes of whole pages happen in worker threads. Ranks know nothing
of it: they share host memory with this process (devices/host_memory.py), and cache/host.py decides who may
touch which page of it when. A page is pinned while it is written, and reserved while it is read, so neither
the death of ranks nor eviction disturbs it.

A fetch ends when its last page has come, at the first page that storage does not have, when its request is
admitted or ends, or when the time of its policy is up. The pages that have come by then, without a gap from
the first one on, stay.
"""

import math
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import TaskGroup
from msgspec import Struct

from runtime import log
from runtime.actors.storage_fetches import Fetch, Fetching, StoredStates, Views, portion
from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import Pin, StatePin, StorageConnector
from runtime.devices.host_memory import HostPages
from runtime.messages.scheduler import StepTokens
from runtime.metrics import Metrics
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan
from runtime.scheduling.scheduler import Scheduler
from runtime.storage.identity import identity as identity_of
from runtime.storage.identity import model_facts, weights
from runtime.storage.settings import TierSettings, backend_settings, tier_settings
from runtime.storage.store import Store, open_store

LAST_WRITES_S = 2.0  # to write queued pages when the server stops
# values of --hicache-storage-prefetch-policy; the third one is wait_complete
BEST_EFFORT, TIMEOUT = "best_effort", "timeout"


class Record(Struct, frozen=True):
    """A page or a state that waits to be written, pinned so that its bytes stay as they are."""

    pin: Pin | StatePin
    parts: list[memoryview]


class StateStorage(Struct, frozen=True):
    """Where states of recurrent layers are kept, and where they are in host memory."""

    store: Store
    views: Views
    state_bytes: int  # on all ranks together


class Writing:
    """Records to be written to storage: a bounded queue, and tasks that write them in worker threads."""

    def __init__(self, store: Store, max_queued: int, record_bytes: int, settings: TierSettings) -> None:
        self._store = store
        self._portion = portion(record_bytes)
        self._max_queued = max_queued  # records; they are pinned
        self._num_writers = max(1, settings.num_threads // 2)
        self._threads = CapacityLimiter(self._num_writers)
        self._queue: deque[Record] = deque()
        self._queued = anyio.Event()

    def put(self, pins: Collection[Pin | StatePin], views: Views) -> None:
        """Queues records; those beyond the queue's capacity are dropped."""
        for pin in pins:
            if len(self._queue) < self._max_queued:
                self._queue.append(Record(pin, views(pin.host)))
            else:
                self._store.totals.pages_dropped += 1
                pin.release()
        if self._queue:
            self._queued.set()

    def start(self, tasks: TaskGroup) -> None:
        """Starts the writers."""
        for _ in range(self._num_writers):
            tasks.start_soon(self._write)

    async def finish(self) -> None:
        """Writes queued records, for at most LAST_WRITES_S."""
        deadline = monotonic() + LAST_WRITES_S
        while self._queue and monotonic() < deadline:
            await self._write_portion()

    async def _write(self) -> None:
        while True:
            while not self._queue:
                if self._queued.is_set():
                    self._queued = anyio.Event()
                await self._queued.wait()
            await self._write_portion()

    async def _write_portion(self) -> None:
        records = [self._queue.popleft() for _ in range(min(self._portion, len(self._queue)))]
        try:
            await to_thread.run_sync(self._write_records, records, limiter=self._threads)
        finally:
            for record in records:
                record.pin.release()

    def _write_records(self, records: list[Record]) -> None:
        for record in records:
            self._store.save(record.pin.key, record.parts)


class StorageActor:
    """Writes saved pages, fetches pages for arriving sequences, and limits how long these wait. The scheduler
    actor calls it (Storage in actors/scheduler.py)."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        views: Views,
        *,
        identity: bytes,
        page_bytes: int,
        settings: TierSettings,
        policy: str,
        wake: Callable[[], None],
        states: StateStorage | None = None,
    ) -> None:
        """`states`: of the model's recurrent layers; None: it has none."""
        self.stores = [store] if states is None else [store, states.store]
        self.num_timeouts = 0  # requests that went on before all their pages had come
        self.wait_s = 0.0  # time that requests were held
        self._scheduler = scheduler
        self._views = views
        self._connector = StorageConnector(lambda: scheduler.cache, identity)
        self.states = None if states is None else StoredStates(states.store, self._connector, states.views)
        self.fetching = Fetching(store, self._connector, views, page_bytes, settings, self.states)
        # half of host memory stays in use
        max_pinned, max_queued = scheduler.cache.tree.hosts.num_pages // 2, settings.max_queued_bytes
        self._writing_states: Writing | None = None
        hosts = scheduler.cache.host.states
        if states is not None and hosts is not None:
            max_queued //= 2
            self._writing_states = Writing(
                states.store,
                min(max_queued // states.state_bytes, max(1, hosts.pool.num_pages // 2)),
                states.state_bytes,
                settings,
            )
        self._writing = Writing(store, min(max_queued // page_bytes, max_pinned), page_bytes, settings)
        self._settings = settings
        self._policy = policy
        self._wake = wake
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Reads and writes until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                for writing in self._writings:
                    writing.start(tasks)
        finally:
            self._tasks = None
            with anyio.CancelScope(shield=True):
                for writing in self._writings:
                    await writing.finish()
                for store in self.stores:
                    await to_thread.run_sync(store.close)

    @property
    def _writings(self) -> list[Writing]:
        return [one for one in (self._writing, self._writing_states) if one is not None]

    def sampled(self, tokens: StepTokens) -> None:
        """A step has brought tokens, which storage does not keep."""

    def saved(self) -> None:
        """Pages and states may have arrived in host memory; called after each result."""
        if pins := self._connector.confirmed():
            self._writing.put(pins, self._views)
        if self._writing_states is not None and self.states is not None:
            self._writing_states.put(self._connector.confirmed_states(), self.states.views)

    def arrived(self, sequence: Sequence) -> None:
        """A sequence has joined the queue: fetches the pages of its prompt that no nearer tier has, if they
        are enough to be worth it."""
        fetch = Fetch(sequence)
        if self._tasks is None or not self.fetching.plan(fetch):
            return
        if self._policy != BEST_EFFORT:
            self._scheduler.roster.waiting.suspend(sequence)
        self._tasks.start_soon(self._fetch, fetch)

    async def clear(self) -> int:
        """Deletes all pages and states of this model from storage. -> how many records. Raises what the
        backend raises."""
        return sum([await to_thread.run_sync(store.clear) for store in self.stores])

    def add_to(self, metrics: Metrics) -> None:
        """Adds the totals of this actor to the metrics, which the caller has set to zero."""
        held_bytes = 0.0
        for store, events in zip(self.stores, (metrics.storage_pages, metrics.storage_states), strict=False):
            totals, stats = store.totals, store.stats()
            held_bytes = max(held_bytes, stats.get("bytes", 0))  # in files, of all records in the directory
            for labelled, values in (
                (
                    events,
                    {
                        "written": totals.pages_written,
                        "read": totals.pages_read,
                        "missed": totals.pages_missed,
                        "corrupt": totals.pages_corrupt,
                        "dropped": totals.pages_dropped,
                        "evicted": stats.get("evicted", 0),
                    },
                ),
                (metrics.storage_bytes, {"write": totals.bytes_written, "read": totals.bytes_read}),
                (metrics.storage_s, {"write": totals.write_s, "read": totals.read_s}),
            ):
                for label, value in values.items():
                    labelled[label] += value
            metrics.storage_errors.value += totals.errors
        metrics.storage_fetched_tokens.value += self.fetching.num_pages * self._connector.cache.page_size
        metrics.storage_timeouts.value += self.num_timeouts
        metrics.storage_wait_s.value += self.wait_s
        metrics.storage_held_bytes.value += held_bytes

    async def _fetch(self, fetch: Fetch) -> None:
        begin = monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.fetching.run, fetch)
            with anyio.move_on_after(self._timeout_s(len(fetch.path))) as scope:
                await fetch.is_over.wait()
            fetch.is_over.set()
            self.num_timeouts += scope.cancelled_caught
            if self._policy != BEST_EFFORT:
                self.wait_s += monotonic() - begin
                self._scheduler.roster.waiting.release(fetch.sequence)
            self._wake()

    def _timeout_s(self, num_pages: int) -> float:
        if self._policy != TIMEOUT:
            return math.inf
        num_tokens = num_pages * self._connector.cache.page_size
        return (
            self._settings.prefetch_timeout_base
            + self._settings.prefetch_timeout_per_ki_token * num_tokens / 1024
        )


async def open_storage(
    plan: Plan,
    model: ModelConfig,
    scheduler: Scheduler,
    ranks: list[HostPages],
    states: list[HostPages],
    wake: Callable[[], None],
) -> StorageActor:
    """The storage tier that the options ask for, over the host memory of all ranks; `states`: that of states
    of recurrent layers, empty where there are none. Raises StartError."""
    backend, config = plan.tiers.hicache_storage_backend, plan.tiers.hicache_storage_backend_extra_config
    assert backend is not None
    settings, page_bytes = tier_settings(config), sum(rank.page_bytes for rank in ranks)
    state_bytes = [rank.page_bytes for rank in states]
    identity = await to_thread.run_sync(
        cache_identity, plan, model, settings.model, [rank.part_bytes for rank in ranks], state_bytes
    )
    store = await to_thread.run_sync(open_store, backend, backend_settings(config), identity, page_bytes)
    log.get("start").info("storage", identity=identity.hex(), page_bytes=page_bytes, **store.stats())
    state_storage = None
    if states:
        size, own = sum(state_bytes), identity_of(states_of=identity.hex())
        state_store = await to_thread.run_sync(open_store, backend, backend_settings(config), own, size)
        state_storage = StateStorage(state_store, _views(states), size)
    return StorageActor(
        store,
        scheduler,
        _views(ranks),
        identity=identity,
        page_bytes=page_bytes,
        settings=settings,
        policy=plan.tiers.hicache_storage_prefetch_policy,
        wake=wake,
        states=state_storage,
    )


def _views(ranks: list[HostPages]) -> Views:
    """The bytes of a host page on every rank."""
    return lambda page: [view for rank in ranks for view in rank.views(page)]


OF_COPIES = ("batches_copies",)  # device options that change how pages are copied, not what they are


def cache_identity(
    plan: Plan,
    model: ModelConfig,
    name: str | None,
    part_bytes: list[tuple[int, ...]],
    state_bytes: list[int],
) -> bytes:
    """Whose pages and states these are; `state_bytes`: of a state on each rank. The layout of host memory is
    no part of it: the parts of a page are the same, and in the same order."""
    facts = model_facts(model)
    if plan.model.load_format == "dummy":
        facts["weights"] = ["dummy", plan.schedule.random_seed]
    else:
        facts["weights"] = weights(Path(plan.model.model_path), name)
    return identity_of(
        model=facts,
        device=plan.parallel.device,
        device_options={name: value for name, value in plan.device_options.items() if name not in OF_COPIES},
        dtype=plan.precision.dtype,
        kv_dtype=plan.precision.kv_cache_dtype,
        page_size=plan.memory.page_size,
        num_ranks=plan.parallel.num_ranks,
        head_ranks=plan.parallel.attention_layout.num_head_ranks,  # as many bytes may be other heads
        part_bytes=part_bytes,
        attention=plan.kernels.attention_backend,
        states=[plan.states.state_dtype, plan.states.mamba_backend, *state_bytes] if state_bytes else [],
    )
