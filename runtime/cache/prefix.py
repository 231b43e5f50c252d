"""The prefix tree: pages of known tokens, found by the tokens that lead to them.

One node is one full page; its key is the page's token ids as bytes, so matching costs one dict look-up per
page. A running sequence locks the nodes on its path. A node without locks may be evicted from the device: it
stays in the tree if it has a host page, and is removed with all nodes below it otherwise. Each namespace has
a root of its own, and no prefix is found from another one (namespace.py).

Sharing prefixes through a tree is the idea of RadixAttention (Zheng et al., 2023, arXiv:2312.07104); this
tree has fixed pages instead of compressed edges.
"""

from array import array
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from runtime.cache.eviction import EvictionQueue, can_leave_device, can_leave_host
from runtime.cache.node import Node
from runtime.cache.pages import PagePool

if TYPE_CHECKING:
    from runtime.cache.groups import NodeEntries
    from runtime.cache.journal import Journal

DEVICE, HOST = 1, 2  # bits of Node.queued


class PrefixTree:
    """Shared pages: `num_pages` on the device, of which `num_evictable` are not locked, and pages of the pool
    `hosts` in host memory."""

    def __init__(self, page_size: int, *, eviction: str = "lru", hosts: PagePool | None = None) -> None:
        self.page_size = page_size
        self.eviction = eviction
        self.root = Node(None, b"", 0)  # of the namespace ""; other roots are removed when they are empty
        self.roots = {"": self.root}
        self.num_pages = 0
        self.num_evictable = 0
        self.groups: tuple[NodeEntries, ...] = ()  # pools of the other entries that nodes may have
        self.journal: Journal | None = None  # records pages that are stored and removed
        self.hosts = hosts or PagePool(1)
        self.orphans: set[Node] = set()  # removed from the tree, but with a pinned host page
        self.is_closed = False  # another tree has taken its place
        self.device_queue = EvictionQueue(eviction, can_leave_device, DEVICE)
        self.host_queue = EvictionQueue(eviction, can_leave_host, HOST)
        self._nowhere = Node(None, b"", 0)  # the match in a namespace that has no root
        self.clock = count(1)

    # ── looking ────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, namespace: str) -> Node:
        """The root of a namespace; the caller locks it, or a node below it, at once."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, namespace.encode(), 0)
        return root

    def match(self, namespace: str, tokens: "array[int]", max_pages: int) -> Node:
        """The deepest node whose path has the first pages of `tokens` (int32), at most `max_pages` deep. The
        caller locks it at once; the nodes count as used."""
        width = self.page_size
        now = next(self.clock)
        node = self.enter(namespace)
        for start in range(0, max_pages * width, width):
            child = node.children.get(tokens[start : start + width].tobytes())
            if child is None:
                break
            child.last_used = now
            child.hits += 1
            node = child
        return node

    def probe(self, node: Node | None, namespace: str, tokens: "array[int]", max_pages: int) -> Node:
        """As `match`, without counting nodes as used. `node` is the result of the last probe for the same
        tokens, so that probing again costs what has changed, not the length of the prompt."""
        node = node or self._nowhere
        # removed from the tree since
        while node.parent is not None and node.parent.children.get(node.key) is not node:
            node = node.parent
        if node.parent is None:
            node = self.roots.get(namespace, self._nowhere)
        width = self.page_size
        for start in range(node.depth * width, max_pages * width, width):
            child = node.children.get(tokens[start : start + width].tobytes())
            if child is None:
                break
            node = child
        return node

    # ── sequences ──────────────────────────────────────────────────────────────────────────────────────

    def lock(self, node: Node) -> None:
        """Locks `node`, which has a device page, and all nodes above it for one sequence."""
        while node.parent is not None:
            if node.locks == 0:
                self.num_evictable -= 1
            node.locks += 1
            node = node.parent
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """Undoes one `lock`."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += 1
                if not node.num_device_children:
                    self.device_queue.offer(node)
            node = node.parent
        node.locks -= 1
        self._drop_if_empty(node)

    def extend(self, node: Node, key: bytes, page: int) -> Node:
        """The child of the locked `node` for `key`, locked as well. It takes `page` unless it has a page
        already; then the caller keeps its page."""
        child = node.child(key)
        if not child.page:
            self.put_page(child, page)
        else:
            if child.locks == 0:
                self.num_evictable -= 1
            child.locks += 1
        child.last_used = next(self.clock)
        return child

    def put_page(self, node: Node, page: int) -> None:
        """`node` takes a device page, and the sequence that brought it runs through it. Its parent is
        locked."""
        assert node.parent is not None
        node.page = page
        node.locks = 1
        node.parent.num_device_children += 1
        self.num_pages += 1
        if self.journal is not None:
            self.journal.stored(node, "GPU")

    # ── leaving ────────────────────────────────────────────────────────────────────────────────────────

    def evict(self, num_pages: int, save: Callable[[Node], None] | None = None) -> list[int]:
        """Evicts `num_pages` pages from the device, or all evictable ones if there are fewer, and returns
        them. `save` is called for each node that is not in host memory, and may give it a host page."""
        pages: list[int] = []
        while len(pages) < num_pages and (node := self.device_queue.pop()) is not None:
            if not node.host and save is not None:
                save(node)
            parent = node.parent
            assert parent is not None
            pages.append(node.page)
            if self.journal is not None:
                self.journal.removed(node, "GPU")
            node.page = 0
            parent.num_device_children -= 1
            if not node.host:
                self._detach(node)
            if parent.parent is not None and not parent.num_device_children:
                self.device_queue.offer(parent)
        self.num_pages -= len(pages)
        self.num_evictable -= len(pages)
        return pages

    def put_host(self, node: Node, host: int) -> None:
        """Gives `node` the host page `host`."""
        assert node.parent is not None and not node.host
        node.host = host
        node.save_step = 0
        node.parent.num_host_children += 1
        if self.journal is not None:
            self.journal.stored(node, "CPU")
        self.host_queue.offer(node)

    def drop_host(self, node: Node) -> None:
        """Evicts `node`, which can leave it, from host memory. It is removed if it is not on the device."""
        if node.page:
            self._leave_host(node)
        else:
            self._detach(node)

    def unpin(self, node: Node) -> None:
        """Undoes one pin. The last one frees the host page of a node that was removed meanwhile."""
        node.pins -= 1
        if node.pins or not node.host:
            return
        if node.is_attached:
            self.host_queue.offer(node)
        else:
            self.hosts.release([node.host])
            node.host = 0
            self.orphans.remove(node)

    def lose_device(self) -> None:
        """Removes all device pages and locks. Nodes whose host pages are complete stay, if all nodes above
        them do."""
        self.num_pages = self.num_evictable = 0
        survivors: list[Node] = []  # parents first
        self.device_queue = EvictionQueue(self.eviction, can_leave_device, DEVICE)
        for root in list(self.roots.values()):
            root.locks = 1  # keeps it until all nodes have been visited
            stack = [root]
            while stack:
                node = stack.pop()
                node.num_device_children = 0
                for child in list(node.children.values()):
                    child.page = child.locks = child.state = 0
                    child.queued &= ~DEVICE
                    if child.host and not child.save_step:
                        stack.append(child)
                        survivors.append(child)
                    else:
                        self._detach(child)
            root.locks = 0
            self._drop_if_empty(root)
        if self.journal is not None:
            self.journal.cleared()
            for node in survivors:
                self.journal.stored(node, "CPU")

    def _leave_host(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.num_host_children -= 1
        if self.journal is not None:
            self.journal.removed(node, "CPU")
        if node.pins:
            self.orphans.add(node)
        else:
            self.hosts.release([node.host])
            node.host = 0
        if parent.parent is not None:
            self.host_queue.offer(parent)

    def _detach(self, node: Node) -> None:
        """Removes a node without a device page and all nodes below it, which have none either."""
        parent = node.parent
        assert parent is not None
        stack = [node]
        while stack:
            gone = stack.pop()
            stack += gone.children.values()
            gone.children.clear()
            if gone is node:
                del parent.children[node.key]
            for group in self.groups:
                if getattr(gone, group.field):
                    group.drop(gone)
            if gone.host:
                self._leave_host(gone)
        if parent.parent is None:
            self._drop_if_empty(parent)

    def _drop_if_empty(self, root: Node) -> None:
        if not (root.locks or root.children) and root is not self.root:
            del self.roots[root.key.decode()]
