"""The host tier: which pages are copied to host memory, when, and which come back.

Copies are orders to the ranks, part of a step's plan (moves.Moves): first its saves, then its loads, then its
forward. Nothing waits for them here; that they are exact follows from the order in which ranks run steps:

- A page is saved by a later plan than the one that published it, so an earlier step has computed it. It may be evicted and given
  away by the plan that saves it: that step's saves come before its loads and its forward, which may write there.
- A load reads what an earlier step has saved, or an earlier save of the same step, and comes before the forward that attends to it.
- Host pages that a plan saves to or loads from are pinned until it is complete. So no plan saves to one host page twice, and none
  saves to a page that it also loads from for somebody else (saves would come first). Later plans may use them for anything: they run later.
- Whoever else reads or writes host memory (a storage tier) is not ordered by steps. For a reader, a page counts only when the result of
  the step that saved it is there (`confirm`), and it is pinned while it is read. A writer gets pages that no step in flight touches
  (`reserve`), and they are its own until it gives them to the tree or back.
- When ranks die, their steps in flight may or may not have been run: what was saved by them is forgotten, what was confirmed stays. Pages
  that they touched are not reserved for writers until new ranks are there and the old ones are certainly gone (`settle`).
"""

from collections import Counter, deque

import numpy as np
from msgspec import Struct

from runtime.cache.node import Node
from runtime.cache.prefix import PrefixTree
from runtime.messages.steps import PageCopies

SAVES_PER_STEP = 256  # pages that are due are saved in portions, so that no step is held up by all at once
_PLANNED = -1  # Node.save_step until the plan has its number


class WritePolicy(Struct, frozen=True):
    """When a page is saved: after so many hits (None: never because of hits), and where it leaves the device
    unsaved."""

    hits: int | None
    at_eviction: bool


WRITE_POLICIES = {
    "write_through": WritePolicy(0, at_eviction=False),
    "write_through_selective": WritePolicy(1, at_eviction=False),
    "write_back": WritePolicy(None, at_eviction=True),
}


class HostConfig(Struct, frozen=True, kw_only=True):
    """What the options and the ranks say about the host tier."""

    num_pages: int = 0  # of the smallest rank; host page 0 is not used. 0: there is no host tier
    write_policy: str = "write_through"
    has_storage: bool = False  # somebody takes what was saved (outside.py)


class Flight(Struct, frozen=True):
    """The moves of a submitted step."""

    step: int
    saves: list[tuple[Node, int]]  # with their host pages
    touched: list[int]  # host pages


class HostTier:
    """Plans moves for one tree. Pages are handed out by `tree.hosts`; a node that has one holds it in
    `Node.host`."""

    def __init__(self, tree: PrefixTree, config: HostConfig) -> None:
        self.tree = tree
        self.policy = WRITE_POLICIES[config.write_policy]
        self.is_on = config.num_pages > 1
        self.has_storage = config.has_storage
        self.confirmed: list[Node] = []  # saved, and known to be, since the last look
        # taken up when a plan begins: pages published by a plan are computed by its step
        self._due: deque[Node] = deque()
        self._saves: list[tuple[Node, int, int]] = []  # of this plan: node, device page, host page
        self._loads: list[tuple[Node, int, int]] = []
        self._flights: deque[Flight] = deque()
        self.reserved: set[int] = set()  # host pages that somebody outside writes to
        self._moving: Counter[int] = Counter()  # steps in flight by the host page that they touch

    @property
    def num_used(self) -> int:
        return self.tree.hosts.num_pages - self.tree.hosts.num_free

    def begin(self) -> None:
        """A plan begins: what was published before it can be saved."""
        for _ in range(min(len(self._due), SAVES_PER_STEP)):
            node = self._due.popleft()
            node.is_due = False
            if node.page and not node.host:
                self.save(node)

    def published(self, node: Node) -> None:
        """A step has computed the page of `node`, or will have."""
        if self.policy.hits == 0:
            self._plan_save(node)

    def used(self, node: Node) -> None:
        """A sequence has found its prefix down to `node`."""
        if self.policy.hits:
            while node.parent is not None:
                if node.hits >= self.policy.hits:
                    self._plan_save(node)
                node = node.parent

    def evicted(self, node: Node) -> None:
        """`node` leaves the device and has no host page."""
        if node.is_due or self.policy.at_eviction:
            self.save(node)

    def save(self, node: Node) -> None:
        """Copies the page of `node` by the plan that is being made, if there is room."""
        host = self._room()
        if host:
            self.tree.put_host(node, host)
            node.pins += 1
            node.save_step = _PLANNED
            self._saves.append((node, node.page, host))

    def load(self, node: Node) -> None:
        """Fills the device page of `node` from its host page by the plan that is being made."""
        node.pins += 1
        self._loads.append((node, node.page, node.host))

    @property
    def has_page_copies(self) -> bool:
        return bool(self._saves or self._loads)

    def take(self, step: int) -> PageCopies | None:
        """The plan is complete: its moves, as those of `step`."""
        if not self.has_page_copies:
            return None
        for node, _, _ in self._saves:
            node.save_step = step
        touched = [host for _, _, host in (*self._saves, *self._loads)]
        self._moving.update(touched)
        self._flights.append(Flight(step, [(node, host) for node, _, host in self._saves], touched))
        _, save_pages, save_hosts = zip(*self._saves, strict=True) if self._saves else ((), (), ())
        _, load_pages, load_hosts = zip(*self._loads, strict=True) if self._loads else ((), (), ())
        page_copies = PageCopies(
            _pages(save_pages), _pages(save_hosts), _pages(load_hosts), _pages(load_pages)
        )
        for node, _, _ in (*self._saves, *self._loads):
            self.tree.unpin(node)
        self._saves, self._loads = [], []
        return page_copies

    def confirm(self, step: int) -> None:
        """The result of `step` is there, so its saves are in host memory."""
        while self._flights and self._flights[0].step <= step:
            flight = self._flights.popleft()
            for node, host in flight.saves:
                if node.host == host and node.save_step == flight.step:
                    node.save_step = 0
                    if self.has_storage:
                        self.confirmed.append(node)
            self._moving -= Counter(flight.touched)

    def lose_ranks(self) -> None:
        """The ranks died, and steps in flight with them. To be called when the tree has forgotten the
        device."""
        self._flights.clear()
        for node in self._due:
            node.is_due = False
        self._due.clear()

    def settle(self) -> None:
        """The old ranks are certainly gone, and new ones have come."""
        self._moving.clear()

    def reserve(self, count: int) -> list[int]:
        """Up to `count` host pages for somebody who writes to them outside the ranks: no step in flight
        touches them."""
        pages: list[int] = []
        moving: list[int] = []
        while len(pages) < count and (host := self._room()):
            (moving if host in self._moving else pages).append(host)
        self.tree.hosts.release(moving)
        self.reserved.update(pages)
        return pages

    def _plan_save(self, node: Node) -> None:
        if not (node.host or node.is_due):
            node.is_due = True
            self._due.append(node)

    def _room(self) -> int:
        """A host page; 0: none to be had."""
        hosts = self.tree.hosts
        if not hosts.num_free:
            victim = self.tree.host_queue.pop()
            if victim is None:
                return 0
            self.tree.drop_host(victim)
        return hosts.allocate(1)[0]


def _pages(pages: tuple[int, ...]) -> np.ndarray:
    return np.array(pages, dtype=np.int32)
