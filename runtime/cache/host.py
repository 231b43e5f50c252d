"""The host tier: which pages are copied to host memory, when, and which come back.

Copies are part of a step's plan (messages/steps.py, PageCopies): first the saves, then the loads, then the
forward pass. Nothing here waits for them; they are correct because ranks run steps in order:

- A page is saved by a later plan than the one that published it, so an earlier step has computed it. The
  plan that saves it may also evict it and give it away, since that step's saves come before its loads and
  its forward pass.
- With `saves_in_step` a page is saved by the very plan that publishes it, behind the forward pass. That is
  possible while a sequence computes it: the sequence has locked it, so the plan cannot give it away.
- A load reads what an earlier step has saved, or a save of the same step, and comes before the forward pass.
- Host pages that a plan saves to or loads from are pinned until the plan is complete. So no plan saves to
  one host page twice, or to a page that it also loads from. Later plans may use them for anything, since
  they run later.
- Storage tiers read and write host memory outside the order of steps. A page may be read once the result of
  the step that saved it has arrived (`confirm`), and is pinned meanwhile. Of a page that the step computes,
  the parts may be read that all ranks have said to have saved (`saved_parts`). Pages to be written are those
  that no step in flight touches (`reserve`); the writer owns them until it puts them into the tree or
  returns them.
- When ranks die, their steps in flight may or may not have run. What these steps saved is forgotten, and
  what was confirmed stays. Pages that they touched are not reserved for writers before the old ranks are
  certainly gone (`ranks_replaced`).
"""

from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from runtime.cache.node import Node
from runtime.cache.prefix import PrefixTree
from runtime.cache.saved_parts import SavedParts
from runtime.messages.steps import PageCopies

if TYPE_CHECKING:
    from runtime.cache.host_states import HostStates

NOTICE_BYTES = 2 << 20  # PageCopies.notice_bytes: a millisecond or two on the way to another server
SAVES_PER_STEP = 256  # saves are spread over steps, so that no step is delayed by many of them
_PLANNED = -1  # Node.save_step until the plan has its number


class WritePolicy(Struct, frozen=True):
    """When a page is saved: after `hits` hits (None: never because of hits), and at its eviction from the
    device if it has not been saved."""

    hits: int | None
    at_eviction: bool


WRITE_POLICIES = {
    "write_through": WritePolicy(0, at_eviction=False),
    "write_through_selective": WritePolicy(1, at_eviction=False),
    "write_back": WritePolicy(None, at_eviction=True),
    "never": WritePolicy(None, at_eviction=False),  # pages come from elsewhere
}


class HostConfig(Struct, frozen=True, kw_only=True):
    """Configuration of the host tier, from options and ranks."""

    num_pages: int = 0  # host pages of the rank with the fewest; page 0 is not used. 0: there is no host tier
    write_policy: str = "write_through"
    num_states: int = 0  # states in host memory of the rank with the fewest; 0 is not used (host_states.py)
    has_storage: bool = False  # a storage tier takes confirmed pages (storage_connector.py)
    saves_in_step: bool = False  # pages are saved by the step that computes them, as others wait for them


class InFlightCopies(Struct, frozen=True):
    """The copies of a submitted step."""

    step: int
    saves: list[tuple[Node, int]]  # nodes and their host pages
    touched: list[int]  # host pages of saves and loads


class HostTier:
    """Plans the copies of one tree. `tree.hosts` allocates host pages; a node has its own in `Node.host`."""

    def __init__(self, tree: PrefixTree, config: HostConfig) -> None:
        self.tree = tree
        self.policy = WRITE_POLICIES[config.write_policy]
        self.is_on = config.num_pages > 1
        self.has_storage = config.has_storage
        self.saves_in_step = config.saves_in_step
        self.states: HostStates | None = None  # of recurrent layers
        self.saved_parts = SavedParts()
        self.confirmed: list[Node] = []  # nodes whose saves have completed since storage last took them
        # nodes to save, from the next plan on: pages published by a plan are computed by its step
        self._due: deque[Node] = deque()
        self._saves: list[tuple[Node, int, int]] = []  # of this plan: node, device page, host page
        self._computed: list[tuple[Node, int, int]] = []  # as _saves, behind the forward pass
        self._loads: list[tuple[Node, int, int]] = []
        self._in_flight: deque[InFlightCopies] = deque()
        self.reserved: set[int] = set()  # host pages that a storage tier writes to
        self._touched: Counter[int] = Counter()  # for each host page the steps in flight that touch it

    @property
    def num_used(self) -> int:
        """Host pages that are not free."""
        return self.tree.hosts.num_pages - self.tree.hosts.num_free

    def begin(self) -> None:
        """Begins a plan: pages that were published before can be saved, and states that were kept."""
        if self.states is not None:
            self.states.begin()
        for _ in range(min(len(self._due), SAVES_PER_STEP)):
            node = self._due.popleft()
            node.is_due = False
            if node.page and not node.host:
                self.save(node)

    def published(self, node: Node, *, is_running: bool = False) -> None:
        """The page of `node` was published: the plan at hand or a submitted step computes it. `is_running`:
        for a sequence that goes on, and has it locked."""
        if self.policy.hits == 0:
            if not (self.saves_in_step and is_running):
                self._plan_save(node)
            elif not (node.host or node.is_due) and (host := self._room()):
                # without room it stays where it is: the next plan would evict the pages before it for it
                _place(self.tree, node, host)
                self._computed.append((node, node.page, host))

    def used(self, node: Node) -> None:
        """A sequence was admitted with the prefix down to `node`."""
        if self.policy.hits:
            while node.parent is not None:
                if node.hits >= self.policy.hits:
                    self._plan_save(node)
                node = node.parent

    def evicted(self, node: Node) -> None:
        """`node` is being evicted from the device and has no host page."""
        if node.is_due or self.policy.at_eviction:
            self.save(node)

    def save(self, node: Node) -> None:
        """Adds a save of the page of `node` to the plan, if a host page can be had."""
        host = self._room()
        if host:
            _place(self.tree, node, host)
            self._saves.append((node, node.page, host))

    def load(self, node: Node) -> None:
        """Adds a load of the page of `node` to the plan, from its host page to its device page."""
        node.pins += 1
        self._loads.append((node, node.page, node.host))

    @property
    def has_copies(self) -> bool:
        """Whether the plan has copies so far."""
        return bool(self._saves or self._loads or self._computed)

    def take(self, step: int) -> PageCopies | None:
        """The copies of the plan, which is complete and becomes `step`; None if there are none."""
        if not self.has_copies:
            return None
        saves = [*self._saves, *self._computed]
        for node, _, _ in saves:
            node.save_step = step
        touched = [host for _, _, host in (*saves, *self._loads)]
        self._touched.update(touched)
        self._in_flight.append(InFlightCopies(step, [(node, host) for node, _, host in saves], touched))
        _, save_pages, save_hosts = zip(*self._saves, strict=True) if self._saves else ((), (), ())
        _, load_pages, load_hosts = zip(*self._loads, strict=True) if self._loads else ((), (), ())
        _, pages, hosts = zip(*self._computed, strict=True) if self._computed else ((), (), ())
        page_copies = PageCopies(
            _pages(save_pages),
            _pages(save_hosts),
            _pages(load_hosts),
            _pages(load_pages),
            _pages(pages),
            _pages(hosts),
            NOTICE_BYTES if pages else 0,
        )
        if pages:
            self.saved_parts.begin(step)
        for node, _, _ in (*saves, *self._loads):
            self.tree.unpin(node)
        self._saves, self._loads, self._computed = [], [], []
        return page_copies

    def confirm(self, step: int) -> None:
        """The result of `step` has arrived, so its saves are complete."""
        if self.states is not None:
            self.states.confirm(step)
        while self._in_flight and self._in_flight[0].step <= step:
            flight = self._in_flight.popleft()
            self.saved_parts.end(flight.step)
            for node, host in flight.saves:
                if node.host == host and node.save_step == flight.step:
                    node.save_step = 0
                    if self.has_storage:
                        self.confirmed.append(node)
            self._touched -= Counter(flight.touched)

    def lose_ranks(self) -> None:
        """The ranks died, and their steps in flight with them. Called after PrefixTree.lose_device."""
        self._in_flight.clear()
        self.saved_parts.clear()
        for node in self._due:
            node.is_due = False
        self._due.clear()

    def ranks_replaced(self) -> None:
        """The old ranks are certainly gone, and new ones have started."""
        self._touched.clear()
        if self.states is not None:
            self.states.places.forget_steps()

    def reserve(self, count: int) -> list[int]:
        """Up to `count` host pages for a storage tier to write to; no step in flight touches them."""
        pages: list[int] = []
        touched: list[int] = []
        while len(pages) < count and (host := self._room()):
            (touched if host in self._touched else pages).append(host)
        self.tree.hosts.release(touched)
        self.reserved.update(pages)
        return pages

    def _plan_save(self, node: Node) -> None:
        if not (node.host or node.is_due):
            node.is_due = True
            self._due.append(node)

    def _room(self) -> int:
        """A host page, evicted if none is free; 0: there is none."""
        hosts = self.tree.hosts
        if not hosts.num_free:
            victim = self.tree.host_queue.pop()
            if victim is None:
                return 0
            self.tree.drop_host(victim)
        return hosts.allocate(1)[0]


def _place(tree: PrefixTree, node: Node, host: int) -> None:
    """Gives a node a host page, to which the plan saves its page."""
    tree.put_host(node, host)
    node.pins += 1
    node.save_step = _PLANNED


def _pages(pages: tuple[int, ...]) -> np.ndarray:
    return np.array(pages, dtype=np.int32)
