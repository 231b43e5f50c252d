"""The KV cache as the scheduler sees it: pages for a sequence, shared with others where the tokens are the
same.

A sequence's pages, by page-table row:

    [0, node.depth)           owned by the prefix tree, locked through `sequence.node`
    [node.depth, len(pages))  owned by the sequence alone

That is of the layers that see everything. Those with a sliding window may have a pool of their own, and
recurrent ones have (see sides.py).

Pages change hands when a plan is made, not when a step has run. That is safe because the ranks run steps in
the order of submission, and store a step's keys and values before they attend: a page published by step n is
written when step n or any later one reads it, and a page released now is reused by a later step only. What
that means for copies in host memory stands in host.py.
"""

from msgspec import Struct

from runtime.cache.groups import CacheGroup, usable
from runtime.cache.host import HostConfig, HostTier
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.prefix import PrefixTree
from runtime.cache.states import StateConfig, StatePool, open_states
from runtime.cache.window import WindowConfig, WindowPool, open_windows
from runtime.scheduling.sequence import Sequence


class CacheConfig(Struct, frozen=True, kw_only=True):
    """How pages are kept. `shares` False keeps every page private (no prefix cache)."""

    shares: bool = True
    eviction: str = "lru"
    host: HostConfig = HostConfig()
    window: WindowConfig = WindowConfig()
    states: StateConfig = StateConfig()


DEFAULT = CacheConfig()


class KVCache:
    """Pages and prefixes together."""

    def __init__(self, num_pages: int, page_size: int, config: CacheConfig = DEFAULT) -> None:
        self.page_size = page_size
        self.shares = config.shares
        self.config = config
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(
            page_size, eviction=config.eviction, hosts=PagePool(max(config.host.num_pages, 1))
        )
        self.host = HostTier(self.tree, config.host)
        self.window: WindowPool | None = None
        self.states: StatePool | None = None
        self._open_groups()

    @property
    def num_available(self) -> int:
        """Pages that can be had now, free or evictable."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        return self.pool.num_pages - self.pool.num_free

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def missing(self, sequence: Sequence) -> int:
        """Pages that `admit` would take for a waiting sequence: also those of the prefix cache that nobody
        uses now, and those for what is in host memory only."""
        known = len(sequence.tokens)
        wanted = self.pages_for(known + 1 if known < sequence.max_len else known)
        if not self.shares or sequence.is_whole:
            return wanted
        tokens = memoryview(sequence.tokens).cast("B")
        sequence.match = self.tree.probe(
            sequence.match, sequence.request.namespace, tokens, (known - 1) // self.page_size
        )
        return wanted - usable(self._groups, sequence.match).num_locked

    def admit(self, sequence: Sequence, *, use_prefix: bool) -> None:
        """Takes pages for all known tokens and the next one; the caller has checked that `missing` ones are
        available.

        Sets the sequence's pages, node, cached_len, loaded_len and computed_len.
        """
        known = len(sequence.tokens)
        namespace = sequence.request.namespace
        if use_prefix and self.shares:
            # at least one token must be computed: its logits are needed
            match = self.tree.match(
                namespace, memoryview(sequence.tokens).cast("B"), (known - 1) // self.page_size
            )
        else:
            match = self.tree.enter(namespace)
        found, match = match, usable(self._groups, match)
        hosted: list[Node] = []  # what is in host memory only, deepest first
        node = match
        while node.parent is not None and not node.page:
            hosted.append(node)
            node = node.parent
        self.tree.lock(node)
        match.pins += 1  # so that what hangs above it stays in host memory while pages are taken
        pages = self._take(self.pages_for(known + 1 if known < sequence.max_len else known) - node.depth)
        for back, page in zip(reversed(hosted), pages, strict=False):
            self.tree.settle(back, page)
            self.host.load(back)
        self.tree.unpin(match)
        if self.host.is_on:
            self.host.used(match)
        sequence.node = match
        sequence.pages = node.path() + pages
        sequence.cached_len = sequence.computed_len = match.depth * self.page_size
        sequence.loaded_len = len(hosted) * self.page_size
        for side in self._groups:
            side.start(sequence, found)

    def grow(self, sequence: Sequence) -> bool:
        """One more page for the sequence. False: none to be had."""
        if self.num_available == 0 or (self.window is not None and not self.window.grow(sequence)):
            return False
        sequence.pages += self._take(1)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Shares the sequence's full pages of known, computed tokens, up to the first that the tree has from
        somebody else."""
        if self.shares:
            self._publish(sequence, None)

    def release(self, sequence: Sequence) -> None:
        """The sequence stops running: shared pages stay in the tree for others, private ones become free."""
        spare: list[int] = []
        if self.shares:
            self._publish(sequence, spare)
        assert sequence.node is not None
        self.pool.release(spare + sequence.pages[sequence.node.depth :])
        for side in self._groups:
            side.leave(sequence)
        self.tree.unlock(sequence.node)
        sequence.pages = []
        sequence.node = None

    def flush(self) -> int:
        """Empties the prefix cache of all that no sequence uses, in host memory as well. -> device pages
        freed"""
        pages = self.tree.evict(self.tree.num_evictable)
        self.pool.release(pages)
        while (node := self.tree.host_queue.pop()) is not None:
            self.tree.drop_host(node)
        return len(pages)

    def lose_device(self) -> None:
        """The ranks died: nobody runs, all device pages are free, and of the prefixes those stay that are in
        host memory for certain."""
        self.tree.groups = ()
        self.tree.lose_device()
        self._open_groups()
        self.host.lose_ranks()
        self.pool = PagePool(self.pool.size, self.pool.broken)

    def resume(self, num_pages: int) -> None:
        """New ranks have come, with what was in host memory."""
        self.pool = PagePool(num_pages)
        self.host.settle()

    def quarantine(self, pages: set[int], hosts: set[int]) -> None:
        """Something is wrong, and nobody runs: empties the cache, and hands these pages out no more. Host
        pages that somebody outside reads or writes must be among them."""
        broken = PagePool(self.tree.hosts.size, self.tree.hosts.broken | hosts)
        tree = PrefixTree(self.page_size, eviction=self.config.eviction, hosts=broken)
        tree.journal, self.tree.journal = self.tree.journal, None
        if tree.journal is not None:
            tree.journal.cleared()
        self.pool = PagePool(self.pool.size, self.pool.broken | pages)
        self.tree.is_closed = True
        self.tree = tree
        self.host = HostTier(tree, self.config.host)
        self._open_groups()

    def _open_groups(self) -> None:
        """Empty ones, for a tree that has nothing of them."""
        self.window = open_windows(self.config.window, self.page_size)
        self.states = open_states(self.config.states, self.page_size)
        groups: tuple[CacheGroup | None, ...] = (self.window, self.states)
        self._groups = self.tree.groups = tuple(side for side in groups if side is not None)

    def _publish(self, sequence: Sequence, spare: list[int] | None) -> None:
        """With `spare`, pages that the tree has already are replaced by the tree's own and put there;
        without, they end the walk: a running sequence's page table is not changed behind its steps."""
        node, size = sequence.node, self.page_size
        assert node is not None
        for row in range(node.depth, min(sequence.computed_len, len(sequence.tokens)) // size):
            key = sequence.tokens[row * size : (row + 1) * size].tobytes()
            page = sequence.pages[row]
            child = node.children.get(key)
            if child is not None and child.page:
                if spare is None:
                    break
                spare.append(page)
            node = self.tree.extend(node, key, page)
            if self.window is not None:
                self.window.publish(sequence, node)
            if node.page == page:
                if self.host.is_on:
                    self.host.published(node)
            else:
                sequence.pages[row] = node.page
        sequence.node = node

    def _take(self, count: int) -> list[int]:
        if (short := count - self.pool.num_free) > 0:
            self.pool.release(self.tree.evict(short, self.host.evicted if self.host.is_on else None))
        return self.pool.allocate(count)
