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
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import anyio
import msgspec
from anyio import CapacityLimiter, to_thread
from anyio.abc import TaskGroup
from msgspec import Struct

from runtime import log
from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import Pin, Reserved, StorageConnector
from runtime.devices.host_memory import HostPages
from runtime.metrics import Metrics
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan
from runtime.scheduling.scheduler import Scheduler
from runtime.storage.identity import identity as identity_of
from runtime.storage.identity import weights
from runtime.storage.settings import TierSettings, backend_settings, tier_settings
from runtime.storage.store import Store, open_store

PORTION_BYTES = 8 << 20  # about as much as a worker thread reads or writes at once
LAST_WRITES_S = 2.0  # to write queued pages when the server stops
# values of --hicache-storage-prefetch-policy; the third one is wait_complete
BEST_EFFORT, TIMEOUT = "best_effort", "timeout"

PageViews = Callable[[int], list[memoryview]]  # host page -> its bytes on every rank


class Page(Struct, frozen=True):
    """A page that waits to be written, pinned so that its bytes stay as they are."""

    pin: Pin
    parts: list[memoryview]


class Fetch:
    """Pages first .. first + len(keys) of a sequence's prompt on their way from storage to reserved host
    pages."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.first = 0
        self.keys: list[bytes] = []
        self.reserved: Reserved | None = None
        self.num_adopted = 0  # of the reserved pages, those that are in the prefix tree
        self.limit = 0  # index of the first page that storage does not have
        self.have: set[int] = set()  # indices, from `first` on, of pages that were read
        self.is_over = anyio.Event()  # the sequence need not wait any longer
        self.is_done = anyio.Event()  # and no thread reads for it any more

    def take(self, end: int) -> Reserved:
        """-> the reserved pages before index `end` that were not taken before"""
        assert self.reserved is not None
        hosts, self.num_adopted = self.reserved.hosts[self.num_adopted : end], end
        return Reserved(hosts, self.reserved.tier)

    @property
    def is_wanted(self) -> bool:
        """Whether the sequence still waits for its first pages. Also called in worker threads."""
        return not (self.is_over.is_set() or self.sequence.is_finished or self.sequence.first_cached_len >= 0)


class Writing:
    """Pages to be written to storage: a bounded queue, and tasks that write its pages in worker threads."""

    def __init__(self, store: Store, max_queued: int, page_bytes: int, settings: TierSettings) -> None:
        self._store = store
        self._portion = _portion(page_bytes)
        self._max_queued = max_queued  # pages; they are pinned
        self._num_writers = max(1, settings.num_threads // 2)
        self._threads = CapacityLimiter(self._num_writers)
        self._queue: deque[Page] = deque()
        self._queued = anyio.Event()

    def put(self, pins: list[Pin], views: PageViews) -> None:
        """Queues pages; those beyond the queue's capacity are dropped."""
        for pin in pins:
            if len(self._queue) < self._max_queued:
                self._queue.append(Page(pin, views(pin.host)))
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
        """Writes queued pages, for at most LAST_WRITES_S."""
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
        pages = [self._queue.popleft() for _ in range(min(self._portion, len(self._queue)))]
        try:
            await to_thread.run_sync(self._write_pages, pages, limiter=self._threads)
        finally:
            for page in pages:
                page.pin.release()

    def _write_pages(self, pages: list[Page]) -> None:
        for page in pages:
            self._store.save(page.pin.key, page.parts)


class Fetching:
    """Pages to be read from storage, for waiting sequences."""

    def __init__(
        self,
        store: Store,
        connector: StorageConnector,
        views: PageViews,
        page_bytes: int,
        settings: TierSettings,
    ) -> None:
        self.num_fetches = 0
        self.num_pages = 0  # pages that were added to the prefix tree
        self._store = store
        self._connector = connector
        self._views = views
        self._threshold = -(-settings.prefetch_threshold // connector.cache.page_size)
        self._portion = _portion(page_bytes)
        self._num_readers = settings.num_threads
        self._threads = CapacityLimiter(self._num_readers)
        # fetches by their first key: later ones with the same key wait for them
        self._leaders: dict[bytes, Fetch] = {}

    def plan(self, fetch: Fetch) -> bool:
        """Sets the pages to fetch: those that no nearer tier has. False: too few to be worth a fetch."""
        wanted = self._connector.wanted(fetch.sequence)
        if len(wanted.keys) < self._threshold:
            return False
        fetch.first, fetch.keys = wanted.first, wanted.keys
        return True

    async def run(self, fetch: Fetch) -> None:
        """Looks up how many of the planned pages storage has, and reads them into the prefix tree."""
        try:
            while (leader := self._leaders.get(fetch.keys[0])) is not None:
                await leader.is_done.wait()
                if not fetch.is_wanted or not self.plan(fetch):
                    return
            self._leaders[fetch.keys[0]] = fetch
            num_pages = await to_thread.run_sync(self._store.count, fetch.keys, limiter=self._threads)
            if num_pages >= self._threshold and fetch.is_wanted:
                await self._read(fetch, num_pages)
        finally:
            if self._leaders.get(fetch.keys[0]) is fetch:
                del self._leaders[fetch.keys[0]]
            fetch.is_done.set()
            fetch.is_over.set()

    async def _read(self, fetch: Fetch, num_pages: int) -> None:
        self.num_fetches += 1
        fetch.reserved = self._connector.reserve(num_pages)
        fetch.limit = len(fetch.reserved.hosts)
        portions = iter(range(0, fetch.limit, self._portion))
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(self._num_readers):
                    tasks.start_soon(self._read_portions, fetch, fetch.reserved.hosts, portions)
        finally:
            self._connector.adopt(fetch.sequence, 0, fetch.take(len(fetch.reserved.hosts)), 0)

    async def _read_portions(self, fetch: Fetch, hosts: list[int], portions: Iterator[int]) -> None:
        for start in portions:
            if start >= fetch.limit or not fetch.is_wanted:
                return
            await to_thread.run_sync(self._read_pages, fetch, hosts, start, limiter=self._threads)
            self._adopt(fetch)

    def _read_pages(self, fetch: Fetch, hosts: list[int], start: int) -> None:
        """In a worker thread: fills one portion of the reserved host pages, up to the first that is not in
        storage."""
        for number in range(start, min(start + self._portion, fetch.limit)):
            if not fetch.is_wanted:
                return
            if not self._store.load(fetch.keys[number], self._views(hosts[number])):
                fetch.limit = min(fetch.limit, number)
                return
            fetch.have.add(number)

    def _adopt(self, fetch: Fetch) -> None:
        """Adds the pages that have come without a gap to the prefix tree."""
        end = fetch.num_adopted
        while end in fetch.have:
            end += 1
        if end > fetch.num_adopted:
            first, taken = fetch.first + fetch.num_adopted, fetch.take(end)
            self.num_pages += self._connector.adopt(fetch.sequence, first, taken, len(taken.hosts))


class StorageActor:
    """Writes saved pages, fetches pages for arriving sequences, and limits how long these wait. The scheduler
    actor calls it (Storage in actors/scheduler.py)."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        views: PageViews,
        *,
        identity: bytes,
        page_bytes: int,
        settings: TierSettings,
        policy: str,
        wake: Callable[[], None],
    ) -> None:
        self.store = store
        self.num_timeouts = 0  # requests that went on before all their pages had come
        self.wait_s = 0.0  # time that requests were held
        self._scheduler = scheduler
        self._views = views
        self._connector = StorageConnector(lambda: scheduler.cache, identity)
        self.fetching = Fetching(store, self._connector, views, page_bytes, settings)
        max_pinned = scheduler.cache.tree.hosts.num_pages // 2  # the other half of host memory stays in use
        self._writing = Writing(
            store, min(settings.max_queued_bytes // page_bytes, max_pinned), page_bytes, settings
        )
        self._settings = settings
        self._policy = policy
        self._wake = wake
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Reads and writes until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._writing.start(tasks)
        finally:
            self._tasks = None
            with anyio.CancelScope(shield=True):
                await self._writing.finish()
                await to_thread.run_sync(self.store.close)

    def saved(self) -> None:
        """Pages may have arrived in host memory; called after each result."""
        if pins := self._connector.confirmed():
            self._writing.put(pins, self._views)

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
        """Deletes all pages of this model from storage. -> how many. Raises what the backend raises."""
        return await to_thread.run_sync(self.store.clear)

    def add_to(self, metrics: Metrics) -> None:
        """Adds the totals of this actor to the metrics, which the caller has set to zero."""
        totals, stats = self.store.totals, self.store.stats()
        for labelled, values in (
            (
                metrics.storage_pages,
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
        metrics.storage_held_bytes.value += stats.get("bytes", 0)

    async def _fetch(self, fetch: Fetch) -> None:
        begin = monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.fetching.run, fetch)
            with anyio.move_on_after(self._timeout_s(len(fetch.keys))) as scope:
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
    plan: Plan, model: ModelConfig, scheduler: Scheduler, ranks: list[HostPages], wake: Callable[[], None]
) -> StorageActor:
    """The storage tier that the options ask for, over the host memory of all ranks. Raises StartError."""
    assert plan.tiers.hicache_storage_backend is not None
    config = plan.tiers.hicache_storage_backend_extra_config
    settings, page_bytes = tier_settings(config), sum(rank.page_bytes for rank in ranks)
    identity = await to_thread.run_sync(
        cache_identity, plan, model, settings.model, [rank.part_bytes for rank in ranks]
    )
    store = await to_thread.run_sync(
        open_store, plan.tiers.hicache_storage_backend, backend_settings(config), identity, page_bytes
    )
    log.get("start").info("storage", identity=identity.hex(), page_bytes=page_bytes, **store.stats())

    def views(page: int) -> list[memoryview]:
        return [view for rank in ranks for view in rank.views(page)]

    return StorageActor(
        store,
        scheduler,
        views,
        identity=identity,
        page_bytes=page_bytes,
        settings=settings,
        policy=plan.tiers.hicache_storage_prefetch_policy,
        wake=wake,
    )


def cache_identity(
    plan: Plan, model: ModelConfig, name: str | None, part_bytes: list[tuple[int, ...]]
) -> bytes:
    """Whose pages these are. The layout of host memory is no part of it: the parts of a page are the same,
    and in the same order."""
    facts = {
        key: value
        for key, value in msgspec.to_builtins(model).items()
        if key not in ("bos_id", "eos_ids", "sampling_defaults")
    }
    if plan.model.load_format == "dummy":
        facts["weights"] = ["dummy", plan.schedule.random_seed]
    else:
        facts["weights"] = weights(Path(plan.model.model_path), name)
    return identity_of(
        model=facts,
        device=plan.parallel.device,
        device_options=plan.device_options,
        dtype=plan.precision.dtype,
        kv_dtype=plan.precision.kv_cache_dtype,
        page_size=plan.memory.page_size,
        num_ranks=plan.parallel.num_ranks,
        part_bytes=part_bytes,
        attention=plan.kernels.attention_backend,
    )


def _portion(page_bytes: int) -> int:
    return max(1, PORTION_BYTES // page_bytes)
