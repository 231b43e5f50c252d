"""Fetches of the storage actor: pages of waiting sequences that storage has and no nearer tier, and the
states of recurrent layers behind them.

A model with recurrent layers can be continued only where there is a state. Of it pages are read up to the
last one that storage has a state behind, and then that state; if it is damaged or gone, the last one before.
"""

from collections.abc import Callable, Iterator

import anyio
from anyio import CapacityLimiter, to_thread

from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import Reserved, StorageConnector
from runtime.storage.settings import TierSettings
from runtime.storage.store import Store

PORTION_BYTES = 8 << 20  # about as much as a worker thread reads or writes at once
Views = Callable[[int], list[memoryview]]  # host page, or place of a state -> its bytes on every rank


class Fetch:
    """Pages first .. first + len(keys) of a sequence's prompt on their way from storage to reserved host
    pages."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.first = 0
        self.keys: list[bytes] = []
        self.passed: list[bytes] = []  # keys of pages that are there, but have no state behind them
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
    def path(self) -> list[bytes]:
        """Keys of all pages behind which the sequence cannot be continued yet."""
        return [*self.passed, *self.keys]

    @property
    def is_wanted(self) -> bool:
        """Whether the sequence still waits for its first pages. Also called in worker threads."""
        return not (self.is_over.is_set() or self.sequence.is_finished or self.sequence.first_cached_len >= 0)


class StoredStates:
    """States of recurrent layers in storage."""

    def __init__(self, store: Store, connector: StorageConnector, views: Views) -> None:
        self.store = store
        self.views = views
        self._connector = connector

    def deepest(self, path: list[bytes]) -> int:
        """How many pages of `path` stand before the last state that storage has; 0: it has none. Blocks."""
        return next((end for end in range(len(path), 0, -1) if self.store.count(path[end - 1 : end])), 0)

    async def fetch(self, fetch: Fetch, num_pages: int, threads: CapacityLimiter) -> None:
        """Reads the last state within the first `num_pages` pages of the fetch's path into the prefix
        tree."""
        if (reserved := self._connector.reserve_state()) is None:
            return
        count = 0
        try:
            path, views = fetch.path[:num_pages], self.views(reserved.place)
            count = await to_thread.run_sync(self._load, path, views, limiter=threads)
        finally:
            depth = fetch.first - len(fetch.passed) + count if count else 0
            self._connector.adopt_state(fetch.sequence, depth, reserved)

    def _load(self, path: list[bytes], views: list[memoryview]) -> int:
        """In a worker thread: reads the last state that is intact. -> the pages before it; 0: there is
        none"""
        while count := self.deepest(path):
            if self.store.load(path[count - 1], views):
                return count
            path = path[: count - 1]
        return 0


class Fetching:
    """Pages to be read from storage, for waiting sequences."""

    def __init__(
        self,
        store: Store,
        connector: StorageConnector,
        views: Views,
        page_bytes: int,
        settings: TierSettings,
        states: StoredStates | None,
    ) -> None:
        """`states`: of the model's recurrent layers; None: it has none."""
        self.num_fetches = 0
        self.num_pages = 0  # pages that were added to the prefix tree
        self._store = store
        self._connector = connector
        self._views = views
        self._states = states
        self._threshold = -(-settings.prefetch_threshold // connector.cache.page_size)
        self._portion = portion(page_bytes)
        self._num_readers = settings.num_threads
        self._threads = CapacityLimiter(self._num_readers)
        # fetches by their first key: later ones with the same key wait for them
        self._leaders: dict[bytes, Fetch] = {}

    def plan(self, fetch: Fetch) -> bool:
        """Sets the pages to fetch: those that no nearer tier has. False: too few to be worth a fetch."""
        wanted = self._connector.wanted(fetch.sequence)
        if len(wanted.passed) + len(wanted.keys) < self._threshold:
            return False
        fetch.first, fetch.keys, fetch.passed = wanted.first, wanted.keys, wanted.passed
        return True

    async def run(self, fetch: Fetch) -> None:
        """Looks up how far storage has the planned pages, and reads them into the prefix tree."""
        try:
            while (leader := self._leaders.get(fetch.path[0])) is not None:
                await leader.is_done.wait()
                if not fetch.is_wanted or not self.plan(fetch):
                    return
            self._leaders[fetch.path[0]] = fetch
            num_passed = len(fetch.passed)
            reached = await to_thread.run_sync(self._reached, fetch, limiter=self._threads)
            if reached < self._threshold or not fetch.is_wanted:
                return
            self.num_fetches += 1
            if reached > num_passed:
                await self._read(fetch, reached - num_passed)
                reached = num_passed + fetch.num_adopted
            if self._states is not None and reached and fetch.is_wanted:
                await self._states.fetch(fetch, reached, self._threads)
        finally:
            if self._leaders.get(fetch.path[0]) is fetch:
                del self._leaders[fetch.path[0]]
            fetch.is_done.set()
            fetch.is_over.set()

    def _reached(self, fetch: Fetch) -> int:
        """In a worker thread: how many pages of the fetch's path the sequence can be continued behind, once
        what storage has of it was read."""
        count = len(fetch.passed) + self._store.count(fetch.keys)
        return count if self._states is None else self._states.deepest(fetch.path[:count])

    async def _read(self, fetch: Fetch, num_pages: int) -> None:
        """Reads the first pages that the sequence misses; `fetch.num_adopted` says how many were there."""
        fetch.reserved = self._connector.reserve(num_pages)
        fetch.limit = len(fetch.reserved.hosts)
        portions = iter(range(0, fetch.limit, self._portion))
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(self._num_readers):
                    tasks.start_soon(self._read_portions, fetch, fetch.reserved.hosts, portions)
        finally:
            adopted = fetch.num_adopted
            self._connector.adopt(fetch.sequence, 0, fetch.take(len(fetch.reserved.hosts)), 0)
            fetch.num_adopted = adopted

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


def portion(record_bytes: int) -> int:
    """Records that a worker thread reads or writes at once."""
    return max(1, PORTION_BYTES // record_bytes)
