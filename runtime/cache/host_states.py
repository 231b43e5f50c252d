"""Copies of kept states in host memory. A node of the prefix tree that has a state (states.py) may have a
copy of it, as it may have a host page next to its device page; `Node.host_state` is its place, 0: none.

Copies are part of a step's plan (messages/steps.py, StateCopies) and are correct for the reasons that hold
for pages (host.py): ranks run steps in order, a plan's saves come before all else, its fetches before the
forward pass. A state is saved by a later plan than the one that keeps it, and only that of an end
(groups.py). What a plan fetches is not given away before the plan is complete. When ranks die, copies whose
steps have no result are forgotten.

Storage tiers read and write places outside the order of steps, as they do host pages: a copy may be read
once the result of its step has arrived (`pin_confirmed`), and is pinned meanwhile; places to be written are
those that no step in flight touches (`reserve`).
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
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


class StatePlaces:
    """Places for states in host memory, and who touches them besides the nodes that own them: plans, steps in
    flight, and a storage tier."""

    def __init__(self, num_states: int, broken: Collection[int]) -> None:
        """`num_states`: with place 0, which is not used; `broken`: places out of use."""
        self.pool = PagePool(num_states, broken)
        self.reserved: set[int] = set()  # a storage tier writes to them
        self._pins: Counter[int] = Counter()  # readers of places, which are not reused meanwhile
        self._orphans: set[int] = set()  # pinned places that no node has any more
        self._touched: Counter[int] = Counter()  # for each place the steps in flight that touch it

    @property
    def outside(self) -> set[int]:
        """Places that neither the pool nor a node has: a storage tier reads or writes them."""
        return self.reserved | self._orphans

    @property
    def pinned(self) -> set[int]:
        """Places that a storage tier reads."""
        return set(+self._pins)

    @property
    def busy(self) -> set[int]:
        """Places that a storage tier reads or writes."""
        return self.reserved | self.pinned

    @property
    def touched(self) -> Collection[int]:
        """Places that steps in flight touch."""
        return self._touched.keys()

    def launch(self, places: list[int]) -> None:
        """A step in flight touches these."""
        self._touched.update(places)

    def finish(self, places: list[int]) -> None:
        """A step that touched these is done."""
        self._touched -= Counter(places)

    def forget_steps(self) -> None:
        """No step is in flight any more: the old ranks are certainly gone."""
        self._touched.clear()

    def pin(self, places: Iterable[int]) -> None:
        """Keeps places of nodes from being reused, until `unpin` of each."""
        self._pins.update(places)

    def unpin(self, place: int) -> None:
        """Undoes one pin. The last one frees a place that its node has given up meanwhile."""
        self._pins[place] -= 1
        if not self._pins[place] and place in self._orphans:
            self._orphans.remove(place)
            self.pool.release([place])

    def give_up(self, place: int) -> None:
        """Takes a place back from its node."""
        if self._pins[place]:
            self._orphans.add(place)
        else:
            self.pool.release([place])


class HostStates:
    """The NodeEntries of states in host memory."""

    kind = "host state"
    field = "host_state"

    def __init__(
        self,
        num_states: int,
        policy: "WritePolicy",
        *,
        has_storage: bool = False,
        broken: Collection[int] = (),
    ) -> None:
        """`num_states` and `broken`: see StatePlaces; `has_storage`: a storage tier takes confirmed
        copies."""
        self.places = StatePlaces(num_states, broken)
        self.pool = self.places.pool
        self.policy = policy
        self.has_storage = has_storage
        self._confirmed: list[tuple[Node, int]] = []  # nodes and places of complete copies for storage
        self._evictable = EvictableNodes()
        self._due: dict[Node, None] = {}  # to be saved from the next plan on
        self._saves: dict[Node, int] = {}  # of this plan: the node's slot on the device
        self._fetches: list[tuple[int, int]] = []  # of this plan: place, slot
        self._held: set[int] = set()  # places that this plan fetches from
        self._late: list[int] = []  # of these, what was given up meanwhile
        # of each step: its saved nodes and their places, and all places that it touches
        self._in_flight: deque[tuple[int, list[tuple[Node, int]], list[int]]] = deque()

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

    def take(self, step: int) -> HostCopies | None:
        """The copies of the plan, which is complete and becomes `step`; None if there are none."""
        if not (self._saves or self._fetches):
            return None
        saves = [(slot, node.host_state) for node, slot in self._saves.items()]
        saved = [(node, node.host_state) for node in self._saves]
        touched = [place for _, place in saves] + [place for place, _ in self._fetches]
        self.places.launch(touched)
        self._in_flight.append((step, saved, touched))
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
            _, saved, touched = self._in_flight.popleft()
            self.places.finish(touched)
            if self.has_storage:
                self._confirmed += saved

    def lose_ranks(self) -> None:
        """The ranks died: copies that are not complete are dropped, and there are no states to save."""
        unsure = [*self._saves, *(node for _, saves, _ in self._in_flight for node, place in saves)]
        places = {*(place for _, saves, _ in self._in_flight for _, place in saves)}
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
        if node.host_state in self._held and node.host_state not in self.places.pinned:
            self._late.append(node.host_state)
        else:
            self.places.give_up(node.host_state)
        node.host_state = 0

    def _save(self, node: Node) -> None:
        if node.host_state or not node.state:
            return
        if place := self._room(self._held):
            node.host_state = place
            self._evictable.add(node, is_end=True)
            self._saves[node] = node.state

    def _room(self, held: Collection[int]) -> int:
        """A place, of the least recently used state if none is free; 0: there is none but `held` ones and
        those that are read."""
        if not self.pool.num_free:
            victim = self._evictable.first_but({*held, *self.places.pinned})
            if victim is None:
                return 0
            self.drop(victim)
        return self.pool.allocate(1)[0]

    # ── storage ────────────────────────────────────────────────────────────────────────────────────────

    def pin_confirmed(self) -> list[tuple[Node, int]]:
        """Nodes whose copies have become complete since the last call, and the places of these, which are not
        reused until `StatePlaces.unpin`."""
        saves = {place for _, saved, _ in self._in_flight for _, place in saved}
        saves |= {node.host_state for node in self._saves}
        pinned = [
            (node, place)
            for node, place in self._confirmed
            if node.host_state == place and place not in saves and node.is_attached
        ]
        self._confirmed = []
        self.places.pin(place for _, place in pinned)
        return pinned

    def reserve(self) -> int:
        """A place for a storage tier to write to, which no step in flight touches; 0: there is none."""
        touched: list[int] = []
        while (place := self._room(self.places.touched)) in self.places.touched:
            touched.append(place)
        self.pool.release(touched)
        if place:
            self.places.reserved.add(place)
        return place

    def adopt(self, node: Node | None, place: int) -> bool:
        """Gives a reserved place, which holds the state of `node`, to the node; frees it if there is no such
        node or it has a copy. -> whether the node took it"""
        self.places.reserved.discard(place)
        if node is None or node.host_state:
            self.pool.release([place])
            return False
        node.host_state = place
        self._evictable.add(node, is_end=True)
        return True


def is_saving(states: HostStates, node: Node) -> bool:
    """Whether a copy of the node's state is still to be made."""
    if node in states._due or node in states._saves:
        return True
    return any(node is saved for _, saves, _ in states._in_flight for saved, _ in saves)
