"""Copies of kept states in host memory. A node of the prefix tree that has a state (states.py) may have a
copy of it, as it may have a host page next to its device page; `Node.host_state` is its place, 0: none.

Copies are part of a step's plan (messages/steps.py, StateCopies) and are correct for the reasons that hold
for pages (host.py): ranks run steps in order, a plan's saves come before all else, its fetches before the
forward pass. A state is saved by a later plan than the one that keeps it, and only that of an end
(groups.py). What a plan fetches is not given away before the plan is complete. When ranks die, copies whose
steps have no result are forgotten.
"""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from runtime.cache.groups import EvictableNodes
from runtime.cache.node import Node
from runtime.cache.pages import PagePool

if TYPE_CHECKING:
    from runtime.cache.host import WritePolicy

SAVES_PER_STEP = 4  # states are large: no step is delayed by many of them


class HostCopies(Struct, frozen=True):
    """What a plan copies: device slots and places in host memory, int32."""

    save_from: np.ndarray
    save_to: np.ndarray
    fetch_from: np.ndarray
    fetch_to: np.ndarray


class HostStates:
    """The NodeEntries of states in host memory."""

    kind = "host state"
    field = "host_state"

    def __init__(self, num_states: int, policy: "WritePolicy") -> None:
        """`num_states`: with place 0, which is not used."""
        self.pool = PagePool(num_states)
        self.policy = policy
        self._evictable = EvictableNodes()
        self._due: dict[Node, None] = {}  # to be saved from the next plan on
        self._saves: dict[Node, int] = {}  # of this plan: the node's slot on the device
        self._fetches: list[tuple[int, int]] = []  # of this plan: place, slot
        self._held: set[int] = set()  # places that this plan fetches from
        self._late: list[int] = []  # of these, what was given up meanwhile
        self._in_flight: deque[tuple[int, list[tuple[Node, int]]]] = deque()  # step: saved nodes and places

    def begin(self) -> None:
        """Begins a plan: states that were kept before can be saved."""
        for node in list(self._due)[:SAVES_PER_STEP]:
            del self._due[node]
            self._save(node)

    def kept(self, node: Node) -> None:
        """`node` has got the state of an end, which a submitted step leaves or the plan at hand."""
        if self.policy.hits == 0 and not node.host_state:
            self._due[node] = None

    def used(self, node: Node) -> None:
        """A sequence continues from the state of `node` on the device."""
        if self.policy.hits and node.hits > self.policy.hits and not node.host_state:
            self._due[node] = None

    def leaving(self, node: Node, *, is_wanted: bool) -> None:
        """The state of `node` is about to leave the device; `is_wanted`: it is an end's, and an earlier plan
        has kept it."""
        is_due = node in self._due
        self._due.pop(node, None)
        if is_wanted and (is_due or self.policy.at_eviction):
            self._save(node)

    def hold(self, node: Node) -> int:
        """The place of a node's copy, which the plan will fetch from."""
        self._evictable.remove(node)
        self._evictable.add(node, is_end=True)
        self._held.add(node.host_state)
        return node.host_state

    def fetch(self, place: int, slot: int) -> None:
        """Adds a copy from a place that is held to a slot on the device."""
        self._fetches.append((place, slot))

    @property
    def has_copies(self) -> bool:
        """Whether the plan has copies so far."""
        return bool(self._saves or self._fetches)

    def take(self, step: int) -> HostCopies:
        """The copies of the plan, which is complete and becomes `step`."""
        saves = [(slot, node.host_state) for node, slot in self._saves.items()]
        if saves:
            self._in_flight.append((step, [(node, node.host_state) for node in self._saves]))
        arrays = [
            np.array([pair[i] for pair in pairs], dtype=np.int32)
            for pairs in (saves, self._fetches)
            for i in (0, 1)
        ]
        self.pool.release(self._late)
        self._saves, self._fetches, self._late = {}, [], []
        self._held.clear()
        return HostCopies(*arrays)

    def confirm(self, step: int) -> None:
        """The result of `step` has arrived, so its saves are complete."""
        while self._in_flight and self._in_flight[0][0] <= step:
            self._in_flight.popleft()

    def lose_ranks(self) -> None:
        """The ranks died: copies that are not complete are dropped, and there are no states to save."""
        unsure = [*self._saves, *(node for _, saves in self._in_flight for node, place in saves)]
        places = {*(place for _, saves in self._in_flight for _, place in saves)}
        places |= {node.host_state for node in self._saves}
        for node in dict.fromkeys(unsure):
            if node.host_state in places:
                self.drop(node)
        self._in_flight.clear()
        self._due.clear()
        self._saves, self._fetches = {}, []
        self._held.clear()
        self.pool.release(self._late)
        self._late = []

    def drop(self, node: Node) -> None:
        """See NodeEntries.drop."""
        self._evictable.remove(node)
        self._saves.pop(node, None)
        if node.host_state in self._held:
            self._late.append(node.host_state)
        else:
            self.pool.release([node.host_state])
        node.host_state = 0

    def _save(self, node: Node) -> None:
        if node.host_state or not node.state:
            return
        if not self.pool.num_free:
            victim = self._evictable.first_but(self._held)
            if victim is None:
                return
            self.drop(victim)
        node.host_state = self.pool.allocate(1)[0]
        self._evictable.add(node, is_end=True)
        self._saves[node] = node.state
