"""The prefix tree: pages whose tokens are known, found again by the tokens that lead to them.

One node is one full page; its key is the page's token ids as bytes, so a match is one dict look-up per page.
A node is locked by every sequence that runs through it. What no sequence runs through is evictable, least recently used
leaf first; a parent is always younger than its children, so evicting leaves in order of use never strands a page.
Each namespace has a root of its own, and nothing is found from another one (see namespace.py).

The idea of sharing prefixes through a tree is RadixAttention's (Zheng et al., 2023, arXiv:2312.07104); ours keeps
fixed pages instead of compressed edges.
"""

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.cache.journal import Journal


class Node:
    """A full page in the tree. `depth` is the number of pages from the root to here, this one included."""

    __slots__ = ("parent", "key", "page", "depth", "children", "locks", "last_used", "is_queued")

    def __init__(self, parent: "Node | None", key: bytes, page: int, depth: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_used = 0
        self.is_queued = False  # has an entry in the eviction heap


class PrefixTree:
    """Shared pages. `num_pages` are held, `num_evictable` of them by nobody but the tree."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(None, b"", 0, 0)  # of the namespace ""; it stays, others go when they are empty
        self.roots = {"": self.root}
        self._nowhere = Node(None, b"", 0, 0)  # what is found in a namespace that has no root
        self.num_pages = 0
        self.num_evictable = 0
        self.journal: Journal | None = None  # is told what comes and goes
        self._clock = count(1)
        self._heap: list[tuple[int, int, Node]] = []  # (last_used, tie-breaker, leaf); entries may be stale
        self._ties = count()

    def enter(self, namespace: str) -> Node:
        """The root of a namespace, for somebody who locks it or something below it at once."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, namespace.encode(), 0, 0)
        return root

    def match(self, namespace: str, tokens: memoryview, max_pages: int) -> Node:
        """The deepest node whose path spells the first pages of `tokens` (int32 as bytes), at most `max_pages` deep; to be locked."""
        width = 4 * self.page_size
        now = next(self._clock)
        node = self.enter(namespace)
        for start in range(0, max_pages * width, width):
            child = node.children.get(tokens[start:start + width].tobytes())
            if child is None:
                break
            child.last_used = now
            node = child
        return node

    def probe(self, node: Node | None, namespace: str, tokens: memoryview, max_pages: int) -> Node:
        """`match` for somebody who only looks: nothing counts as used. `node` is what the last look at the same tokens gave, so that
        looking again costs what has changed, not the length of the prompt."""
        node = node or self._nowhere
        while node.parent is not None and node.parent.children.get(node.key) is not node:  # evicted, as all below it were before
            node = node.parent
        if node.parent is None:
            node = self.roots.get(namespace, self._nowhere)
        width = 4 * self.page_size
        for start in range(node.depth * width, max_pages * width, width):
            child = node.children.get(tokens[start:start + width].tobytes())
            if child is None:
                break
            node = child
        return node

    def num_locked(self, node: Node) -> int:
        """How many of the pages from the root to `node` sequences run through."""
        while node.parent is not None and not node.locks:
            node = node.parent
        return node.depth

    def path(self, node: Node) -> list[int]:
        """Pages from the root to `node`."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def lock(self, node: Node) -> None:
        """A sequence runs through `node` and all above it."""
        while node.parent is not None:
            if node.locks == 0:
                self.num_evictable -= 1
            node.locks += 1
            node = node.parent
        node.locks += 1

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += 1
                self._offer(node)
            node = node.parent
        node.locks -= 1
        self._drop_if_empty(node)

    def extend(self, node: Node, key: bytes, page: int) -> Node:
        """The child of the locked `node` for `key`, locked as well: a new one that takes `page`, or the one that is there.

        The caller keeps its page when the returned node has another one.
        """
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, page, node.depth + 1)
            child.locks = 1
            self.num_pages += 1
            if self.journal is not None:
                self.journal.stored(child)
        else:
            if child.locks == 0:
                self.num_evictable -= 1
            child.locks += 1
        child.last_used = next(self._clock)
        return child

    def evict(self, num_pages: int) -> list[int]:
        """Gives up `num_pages` pages, or all that are evictable when those are fewer."""
        pages: list[int] = []
        while len(pages) < num_pages and self._heap:
            last_used, _, node = heappop(self._heap)
            node.is_queued = False
            if node.locks or node.children:
                continue
            if node.last_used != last_used:  # used again since it was queued
                self._offer(node)
                continue
            assert node.parent is not None
            del node.parent.children[node.key]
            pages.append(node.page)
            if self.journal is not None:
                self.journal.removed(node)
            if node.parent.parent is None:
                self._drop_if_empty(node.parent)
            else:
                self._offer(node.parent)
        self.num_pages -= len(pages)
        self.num_evictable -= len(pages)
        return pages

    def _offer(self, node: Node) -> None:
        """Queues `node` for eviction if it is an unlocked leaf."""
        if not (node.locks or node.children or node.is_queued):
            node.is_queued = True
            heappush(self._heap, (node.last_used, next(self._ties), node))

    def _drop_if_empty(self, root: Node) -> None:
        if not (root.locks or root.children) and root is not self.root:
            del self.roots[root.key.decode()]
