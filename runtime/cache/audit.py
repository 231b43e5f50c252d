"""Looks whether every page of the cache is where it should be: free, with one node, or with one sequence.

It walks all of the cache in portions, for somebody who has nothing better to do. What it finds means
something only if nothing has changed meanwhile: before anything is done about it, walk again in one go
(`findings`).
"""

from collections import Counter
from collections.abc import Generator, Iterable

from msgspec import Struct

from runtime.cache.eviction import can_leave_device, can_leave_host
from runtime.cache.groups import CacheGroup
from runtime.cache.kv import KVCache
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.prefix import DEVICE, HOST
from runtime.scheduling.sequence import Sequence

PORTION = 500  # nodes, about a millisecond
MAX_TOLD = 10  # findings in words


class Findings(Struct):
    """What is wrong: pages that nobody has or that two have, and everything in words."""

    pages: set[int]
    hosts: set[int]
    busy: set[int]  # host pages that somebody outside reads or writes; nothing is wrong with that
    words: list[str]

    @property
    def is_clean(self) -> bool:
        return not self.words

    def add(self, words: str) -> None:
        if len(self.words) < MAX_TOLD:
            self.words.append(words)


def audit(cache: KVCache, sequences: Iterable[Sequence] = ()) -> Generator[None, None, Findings]:
    """`sequences` are all that hold pages. Yields after each portion."""
    tree = cache.tree
    found = Findings(set(), set(), cache.host.reserved | {node.host for node in tree.orphans}, [])
    sequences = list(sequences)
    pages, hosts, locks = _held(cache, sequences)
    groups = [(side, Counter(side.pool.free)) for side in tree.groups]
    for side, owners in groups:
        owners.update(entry for sequence in sequences for entry in _own(side, sequence))
    num_pages = num_evictable = seen = 0
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        children = list(node.children.values())
        stack += children
        if problem := _wrong(node, children, locks[node]):
            found.add(f"a node {node.depth} pages deep {problem}")
        if node.page:
            pages[node.page] += 1
            num_pages += 1
            num_evictable += not node.locks
        for side, owners in groups:
            if entry := getattr(node, side.field):
                owners[entry] += 1
        if node.host:
            hosts[node.host] += 1
            if node.pins:
                found.busy.add(node.host)
        seen += 1
        if seen % PORTION == 0:
            yield
    if (num_pages, num_evictable) != (tree.num_pages, tree.num_evictable):
        found.add(
            f"the tree counts {tree.num_pages} pages, {tree.num_evictable} of them evictable; it has {num_pages} and {num_evictable}"
        )
    _compare("page", pages, cache.pool, found.pages, found)
    _compare("host page", hosts, tree.hosts, found.hosts, found)
    for side, owners in groups:  # a quarantine begins with new ones: which entries were wrong does not matter
        _compare(side.kind, owners, side.pool, set(), found)
    return found


def findings(cache: KVCache, sequences: Iterable[Sequence] = ()) -> Findings:
    """The whole audit at once."""
    steps = audit(cache, sequences)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Findings = end.value
            return found


def _held(cache: KVCache, sequences: Iterable[Sequence]) -> tuple[Counter[int], Counter[int], Counter[Node]]:
    """Pages and host pages outside the tree, and how often each node must be locked."""
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


def _own(side: CacheGroup, sequence: Sequence) -> list[int]:
    held = getattr(sequence, side.field)
    return [] if held is None else list(held.own)


def _wrong(node: Node, children: list[Node], locks: int) -> str:
    """What is wrong with a node, in words; "" if nothing is."""
    if node.locks != locks:
        return f"is locked {node.locks} times, and {locks} sequences run through it"
    if node.num_resident != sum(child.page > 0 for child in children) or node.num_hosted != sum(
        child.host > 0 for child in children
    ):
        return "counts its children wrongly"
    if node.parent is None:
        return "is a root with a page" if node.page or node.host else ""
    if not (node.page or node.host):
        return "has no page"
    if not node.page and (node.num_resident or node.locks):
        return "is not on the device, but what hangs below it is"
    if (can_leave_device(node) and not node.queued & DEVICE) or (
        can_leave_host(node) and not node.queued & HOST
    ):
        return "could be evicted, but is not in the queue"
    return ""


def _compare(kind: str, owners: Counter[int], pool: PagePool, wrong: set[int], found: Findings) -> None:
    if len(owners) == sum(owners.values()) == pool.num_pages and owners.keys() <= pool.usable:
        return
    wrong |= {page for page in pool.usable if owners[page] != 1} | (owners.keys() - pool.usable)
    for page in sorted(wrong)[:MAX_TOLD]:
        found.add(f"{kind} {page} has {owners[page]} owners")
