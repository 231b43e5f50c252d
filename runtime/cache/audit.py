"""Checks that every page of the cache is free, owned by one node, or owned by one sequence.

The audit walks the cache in portions, for use in idle time. Its findings are valid only if nothing changes
meanwhile; before anything is done about them, audit again at once (`findings`).
"""

from collections import Counter
from collections.abc import Generator, Iterable

from msgspec import Struct

from runtime.cache.eviction import can_leave_device, can_leave_host
from runtime.cache.groups import NodeEntries
from runtime.cache.kv import KVCache
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.prefix import DEVICE, HOST
from runtime.cache.sequence import Sequence

PORTION = 250  # nodes, about half a millisecond
IDS = 8192  # free pages, and pages whose owners are compared, in the same time
MAX_MESSAGES = 10


class Findings(Struct):
    """Inconsistencies: pages without an owner or with several, and messages about all that is wrong."""

    pages: set[int]
    hosts: set[int]
    busy: set[int]  # host pages that a storage tier reads or writes, which is no inconsistency
    messages: list[str]

    @property
    def is_clean(self) -> bool:
        """Whether the cache is consistent."""
        return not self.messages

    def add(self, message: str) -> None:
        """Adds a message, unless there are MAX_MESSAGES already."""
        if len(self.messages) < MAX_MESSAGES:
            self.messages.append(message)


def audit(cache: KVCache, sequences: Iterable[Sequence] = ()) -> Generator[None, None, Findings]:
    """Audits the cache; `sequences` are all that hold pages. Yields after each portion."""
    tree = cache.tree
    busy = cache.host.reserved | {node.host for node in tree.orphans}
    result = Findings(set(), set(), busy, [])
    pages, hosts = Owners(cache.pool), Owners(tree.hosts)
    groups = [(group, Owners(group.pool)) for group in tree.groups]
    for owners in (pages, hosts, *[owners for _, owners in groups]):
        yield from owners.add_free()
    sequences = list(sequences)
    locks = _held(cache, sequences, pages, hosts)
    for group, owners in groups:
        owners.add([entry for sequence in sequences for entry in _own(group, sequence)])
        if group is cache.host.states:
            owners.add(cache.host.states.places.outside)
    num_pages = num_evictable = seen = 0
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        children = list(node.children.values())
        stack += children
        if problem := _wrong(node, children, locks[node]):
            result.add(f"a node {node.depth} pages deep {problem}")
        if node.page:
            pages.add([node.page])
            num_pages += 1
            num_evictable += not node.locks
        for group, owners in groups:
            if entry := getattr(node, group.field):
                owners.add([entry])
        if node.host:
            hosts.add([node.host])
            if node.pins:
                result.busy.add(node.host)
        seen += 1
        if seen % PORTION == 0:
            yield
    if (num_pages, num_evictable) != (tree.num_pages, tree.num_evictable):
        result.add(
            f"the tree counts {tree.num_pages} pages, {tree.num_evictable} of them evictable; it has "
            f"{num_pages} and {num_evictable}"
        )
    yield from pages.compare("page", result.pages, result)
    yield from hosts.compare("host page", result.hosts, result)
    for group, owners in groups:
        # a quarantine replaces groups, so it does not matter which entries are wrong
        yield from owners.compare(group.kind, set(), result)
    return result


def findings(cache: KVCache, sequences: Iterable[Sequence] = ()) -> Findings:
    """The whole audit at once."""
    steps = audit(cache, sequences)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Findings = end.value
            return result


class Owners:
    """How many owners each page of a pool has. To be free counts as one."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._counts = bytearray(pool.size)  # by page; 255 stands for more, too
        self._others = Counter[int]()  # pages that no pool of this size has

    def add(self, pages: Iterable[int]) -> None:
        """Counts an owner of each page."""
        counts = self._counts
        for page in pages:
            if not 0 < page < len(counts):
                self._others[page] += 1
            elif counts[page] < 255:
                counts[page] += 1

    def add_free(self) -> Generator[None, None, None]:
        """Counts the free pages. Yields after each IDS of them."""
        free = list(self._pool.free)
        for at in range(0, len(free), IDS):
            self.add(free[at : at + IDS])
            yield

    def compare(self, kind: str, wrong: set[int], result: Findings) -> Generator[None, None, None]:
        """Adds the pages without an owner or with several to `wrong`, and messages to `result`. Yields after
        each IDS pages."""
        broken, counts = self._pool.broken, self._counts
        for at in range(1, len(counts), IDS):
            part = counts[at : at + IDS]
            if broken or part.count(1) < len(part):
                wrong.update(page for page, count in enumerate(part, at) if count != (page not in broken))
            yield
        wrong.update(self._others)
        for page in sorted(wrong)[:MAX_MESSAGES]:
            count = self._others[page] or counts[page]
            result.add(f"{kind} {page} has {count} owners")


def _held(cache: KVCache, sequences: Iterable[Sequence], pages: Owners, hosts: Owners) -> Counter[Node]:
    """Counts owners of pages and of host pages outside the tree. -> the number of locks that each node should
    have"""
    locks = Counter[Node]()
    for sequence in sequences:
        node = sequence.node
        if node is not None:
            pages.add(sequence.pages[node.depth :])
            while node is not None:
                locks[node] += 1
                node = node.parent
    hosts.add([node.host for node in cache.tree.orphans])
    hosts.add(cache.host.reserved)
    return locks


def _own(group: NodeEntries, sequence: Sequence) -> list[int]:
    held = getattr(sequence, group.field, None)
    return [] if held is None else list(held.own)


def _wrong(node: Node, children: list[Node], locks: int) -> str:
    """What is wrong with a node; "" if nothing is."""
    if node.locks != locks:
        return f"is locked {node.locks} times, and {locks} sequences run through it"
    if node.num_device_children != sum(child.page > 0 for child in children) or node.num_host_children != sum(
        child.host > 0 for child in children
    ):
        return "counts its children wrongly"
    if node.parent is None:
        return "is a root with a page" if node.page or node.host else ""
    if not (node.page or node.host):
        return "has no page"
    if not node.page and (node.num_device_children or node.locks):
        return "is not on the device, but what hangs below it is"
    if (can_leave_device(node) and not node.queued & DEVICE) or (
        can_leave_host(node) and not node.queued & HOST
    ):
        return "could be evicted, but is not in the queue"
    return ""
