"""The KV cache as the scheduler sees it: pages for sequences, shared between those with the same tokens.

Pages of a sequence, by page-table row:

    [0, node.depth)           owned by the prefix tree, locked through `sequence.node`
    [node.depth, len(pages))  owned by the sequence

These are the pages of full-attention layers. Sliding-window layers may have a pool of their own, and
recurrent layers have one (groups.py).

Pages change owners when a plan is made, not when a step has run. Ranks run steps in the order of submission
and store a step's keys and values before they attend, so a page that step n publishes has been written when
step n or a later one reads it, and a page that is released now is overwritten by a later step only. host.py
describes what follows for copies to host memory.
"""

from collections.abc import Collection

from msgspec import Struct

from runtime.cache.groups import CacheGroup, usable
from runtime.cache.host import WRITE_POLICIES, HostConfig, HostTier
from runtime.cache.host_states import HostStates
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.prefix import PrefixTree
from runtime.cache.sequence import Sequence
from runtime.cache.states import StateConfig, StatePool, open_states
from runtime.cache.window import WindowConfig, WindowPool, open_windows


class CacheConfig(Struct, frozen=True, kw_only=True):
    """Configuration of the cache. With `shares` False every page is private: there is no prefix cache."""

    shares: bool = True
    eviction: str = "lru"
    host: HostConfig = HostConfig()
    window: WindowConfig = WindowConfig()
    states: StateConfig = StateConfig()


DEFAULT = CacheConfig()


class KVCache:
    """The page pool, the prefix tree, the host tier and the KV cache groups."""

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
        self.groups: tuple[CacheGroup, ...] = ()  # those of the two that there are
        self._open_groups()

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free or evictable."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        """Pages that are not free."""
        return self.pool.num_pages - self.pool.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

    def missing(self, sequence: Sequence) -> int:
        """Pages that `admit` would take from the available ones for a waiting sequence. Matching pages of the
        prefix cache that no sequence locks, and pages that are in host memory only, are included."""
        known = len(sequence.tokens)
        wanted = self.pages_for(known + 1 if known < sequence.max_len else known)
        if not self.shares or sequence.is_whole:
            return wanted
        sequence.match = self.tree.probe(
            sequence.match, sequence.request.namespace, sequence.tokens, (known - 1) // self.page_size
        )
        return wanted - usable(self.groups, sequence.match).num_locked

    def admit(self, sequence: Sequence, *, use_prefix: bool) -> None:
        """Takes pages for all known tokens and the next one; the caller has checked that `missing` pages are
        available.

        Sets the sequence's pages, node, cached_len, loaded_len and computed_len.
        """
        known = len(sequence.tokens)
        namespace = sequence.request.namespace
        if use_prefix and self.shares:
            # at least one token must be computed: its logits are needed
            match = self.tree.match(namespace, sequence.tokens, (known - 1) // self.page_size)
        else:
            match = self.tree.enter(namespace)
        deepest, match = match, usable(self.groups, match)
        host_only: list[Node] = []  # matching nodes that are in host memory only, deepest first
        node = match
        while node.parent is not None and not node.page:
            host_only.append(node)
            node = node.parent
        self.tree.lock(node)
        match.pins += 1  # keeps it and the nodes above it in host memory while pages are taken
        pages = self._take(self.pages_for(known + 1 if known < sequence.max_len else known) - node.depth)
        for loaded, page in zip(reversed(host_only), pages, strict=False):
            self.tree.put_page(loaded, page)
            self.host.load(loaded)
        self.tree.unpin(match)
        if self.host.is_on:
            self.host.used(match)
        sequence.node = match
        sequence.pages = node.path() + pages
        sequence.cached_len = sequence.computed_len = match.depth * self.page_size
        sequence.loaded_len = len(host_only) * self.page_size
        for group in self.groups:
            group.start(sequence, deepest)

    def grow(self, sequence: Sequence) -> bool:
        """Takes one more page for the sequence. False: there is none."""
        if self.num_available == 0 or (self.window is not None and not self.window.grow(sequence)):
            return False
        sequence.pages += self._take(1)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Puts the sequence's full pages of known, computed tokens into the tree, up to the first that the
        tree has from another sequence."""
        if self.shares:
            self._publish(sequence, None)

    def release(self, sequence: Sequence) -> None:
        """The sequence stops running: its shared pages stay in the tree, its private ones become free."""
        spare: list[int] = []
        if self.shares:
            self._publish(sequence, spare)
        assert sequence.node is not None
        self.pool.release(spare + sequence.pages[sequence.node.depth :])
        for group in self.groups:
            group.leave(sequence)
        self.tree.unlock(sequence.node)
        sequence.pages = []
        sequence.node = None

    def flush(self) -> int:
        """Evicts all pages that no sequence uses, from the device and from host memory. Returns the number of
        device pages freed."""
        pages = self.tree.evict(self.tree.num_evictable)
        self.pool.release(pages)
        while (node := self.tree.host_queue.pop()) is not None:
            self.tree.drop_host(node)
        return len(pages)

    def lose_device(self) -> None:
        """The ranks died: no sequence runs, all device pages are free, and only prefixes whose copies in host
        memory are complete remain."""
        hosts = None if self.states is None else self.states.hosts
        if hosts is not None:
            hosts.lose_ranks()
        self.tree.groups = () if hosts is None else (hosts,)
        self.tree.lose_device()
        self._open_groups(hosts)
        self.host.lose_ranks()
        self.pool = PagePool(self.pool.size, self.pool.broken)

    def resume(self, num_pages: int) -> None:
        """New ranks have started, on the same host memory."""
        self.pool = PagePool(num_pages)
        self.host.ranks_replaced()

    def quarantine(self, pages: set[int], hosts: set[int]) -> None:
        """Empties the cache after an audit found it inconsistent, while no sequence runs, and takes these
        pages out of use. Host pages that a storage tier reads or writes must be among them."""
        broken = PagePool(self.tree.hosts.size, self.tree.hosts.broken | hosts)
        tree = PrefixTree(self.page_size, eviction=self.config.eviction, hosts=broken)
        tree.journal, self.tree.journal = self.tree.journal, None
        if tree.journal is not None:
            tree.journal.cleared()
        self.pool = PagePool(self.pool.size, self.pool.broken | pages)
        self.tree.is_closed = True
        self.tree = tree
        old = self.host.states
        self.host = HostTier(tree, self.config.host)
        self._open_groups(busy=set() if old is None else old.places.busy)

    def _open_groups(self, hosts: HostStates | None = None, busy: Collection[int] = ()) -> None:
        """Opens empty groups, for a tree whose nodes have no entries of them, but for states in host memory
        (`hosts`; None: of these there are none either, and places of `busy` are out of use)."""
        if hosts is None and self.config.states.num_slots and self.config.host.num_states > 1:
            host = self.config.host
            hosts = HostStates(
                host.num_states, WRITE_POLICIES[host.write_policy], has_storage=host.has_storage, broken=busy
            )
        self.host.states = hosts
        self.window = open_windows(self.config.window, self.page_size)
        self.states = open_states(self.config.states, self.page_size, hosts)
        groups: tuple[CacheGroup | None, ...] = (self.window, self.states)
        self.groups = tuple(group for group in groups if group is not None)
        self.tree.groups = self.groups if hosts is None else (*self.groups, hosts)

    def _publish(self, sequence: Sequence, spare: list[int] | None) -> None:
        """With `spare`, pages of which the tree has another copy are replaced by that copy and appended to
        `spare`. Without it, the first such page ends the walk, because the page table of a running sequence
        may not change."""
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
                    self.host.published(node, is_running=spare is None)
            else:
                sequence.pages[row] = node.page
        sequence.node = node

    def _take(self, count: int) -> list[int]:
        if (short := count - self.pool.num_free) > 0:
            self.pool.release(self.tree.evict(short, self.host.evicted if self.host.is_on else None))
        return self.pool.allocate(count)
