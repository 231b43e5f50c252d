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

PORTION = 500  # nodes, about a millisecond
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
    result = Findings(set(), set(), cache.host.reserved | {node.host for node in tree.orphans}, [])
    sequences = list(sequences)
    pages, hosts, locks = _held(cache, sequences)
    groups = [(group, Counter(group.pool.free)) for group in tree.groups]
    for group, owners in groups:
        owners.update(entry for sequence in sequences for entry in _own(group, sequence))
        if group is cache.host.states:
            owners.update(cache.host.states.places.outside)
    num_pages = num_evictable = seen = 0
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        children = list(node.children.values())
        stack += children
        if problem := _wrong(node, children, locks[node]):
            result.add(f"a node {node.depth} pages deep {problem}")
        if node.page:
            pages[node.page] += 1
            num_pages += 1
            num_evictable += not node.locks
        for group, owners in groups:
            if entry := getattr(node, group.field):
                owners[entry] += 1
        if node.host:
            hosts[node.host] += 1
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
    _compare("page", pages, cache.pool, result.pages, result)
    _compare("host page", hosts, tree.hosts, result.hosts, result)
    for (
        group,
        owners,
    ) in groups:  # a quarantine replaces groups, so it does not matter which entries are wrong
        _compare(group.kind, owners, group.pool, set(), result)
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


def _held(cache: KVCache, sequences: Iterable[Sequence]) -> tuple[Counter[int], Counter[int], Counter[Node]]:
    """Owners of pages and of host pages outside the tree, and the number of locks that each node should
    have."""
    pages, locks = Counter(cache.pool.free), Counter[Node]()
    for sequence in sequences:
        node = sequence.node
        if node is not None:
            pages.update(sequence.pages[node.depth :])
            while node is not None:
                locks[node] += 1
                node = node.parent
    tree = cache.tree
    hosts = (
        Counter(tree.hosts.free) + Counter(node.host for node in tree.orphans) + Counter(cache.host.reserved)
    )
    return pages, hosts, locks


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


def _compare(kind: str, owners: Counter[int], pool: PagePool, wrong: set[int], result: Findings) -> None:
    if len(owners) == sum(owners.values()) == pool.num_pages and owners.keys() <= set(pool.usable):
        return
    wrong |= {page for page in pool.usable if owners[page] != 1} | (owners.keys() - set(pool.usable))
    for page in sorted(wrong)[:MAX_MESSAGES]:
        result.add(f"{kind} {page} has {owners[page]} owners")
