"""A storage tier that remembers everything, between a scheduler and an oracle rank, and takes its time."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import Pin, Reserved, ReservedState, StatePin, StorageConnector
from runtime.scheduling.scheduler import Scheduler
from tests.scheduling.oracle import OracleRank


class Fetch(NamedTuple):
    """Pages, and the state behind the last of them that has one, on their way to host memory."""

    sequence: Sequence
    first: int
    path: list[bytes]  # keys of pages that have come, behind those that lack a state
    reserved: Reserved
    state: ReservedState | None


class Shelf:
    """Pages and states by key, and what is under way."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.connector = StorageConnector(lambda: scheduler.cache, b"a model")
        self.pages: dict[bytes, np.ndarray] = {}
        self.states: dict[bytes, bytes] = {}
        self.pins: list[Pin | StatePin] = []
        self.fetches: list[Fetch] = []
        self.num_adopted = 0
        self.num_adopted_states = 0

    def watch(self) -> None:
        self.pins += self.connector.confirmed()
        self.pins += self.connector.confirmed_states()

    def write(self, rank: OracleRank) -> None:
        """The oldest page that waits for it."""
        pin = self.pins.pop(0)
        if isinstance(pin, StatePin):
            self._write_state(pin, rank)
        elif pin.tree is self.scheduler.cache.tree:
            assert pin.host not in rank.touched(self.scheduler.last_step, loads=False), (
                "a step in flight overwrites what is read"
            )
            page = rank.host[pin.host].copy()
            assert page.min() >= 0 and (pin.key not in self.pages or (self.pages[pin.key] == page).all())
            self.pages[pin.key] = page
        pin.release()

    def _write_state(self, pin: StatePin, rank: OracleRank) -> None:
        if pin.states is not self.scheduler.cache.host.states:
            return
        assert pin.host not in rank.touched_states(self.scheduler.last_step, fetches=False)
        state = rank.host_states[pin.host]
        assert state is not None and self.states.setdefault(pin.key, state) == state

    def fetch(self, sequence: Sequence, rank: OracleRank) -> None:
        """Holds the sequence back until `arrive`."""
        wanted = self.connector.wanted(sequence)
        found = 0
        while found < len(wanted.keys) and wanted.keys[found] in self.pages:
            found += 1
        reserved = self.connector.reserve(found)
        assert not set(reserved.hosts) & rank.touched(self.scheduler.last_step, loads=True), (
            "a step in flight uses what is written to"
        )
        self.scheduler.roster.waiting.suspend(sequence)
        path = [*wanted.passed, *wanted.keys[: len(reserved.hosts)]]
        state = self.connector.reserve_state()
        touched = rank.touched_states(self.scheduler.last_step, fetches=True)
        assert state is None or state.place not in touched
        self.fetches.append(Fetch(sequence, wanted.first, path, reserved, state))

    def arrive(self, rank: OracleRank, part: float = 1.0) -> None:
        """The oldest fetch is done, or given up after some pages."""
        sequence, first, path, reserved, state = self.fetches.pop(0)
        num_passed = len(path) - min(len(path), len(reserved.hosts))
        keys = path[num_passed:]
        count = int(len(keys) * part)
        if reserved.tier is self.scheduler.cache.host:
            for host, key in zip(reserved.hosts[:count], keys, strict=False):
                rank.host[host] = self.pages[key]
        self.num_adopted += self.connector.adopt(sequence, first, reserved, count)
        if state is not None:
            ends = [end for end, key in enumerate(path[: num_passed + count], 1) if key in self.states]
            depth = first - num_passed + ends[-1] if ends else 0
            if ends and state.states is self.scheduler.cache.host.states:
                rank.host_states[state.place] = self.states[path[ends[-1] - 1]]
            self.num_adopted_states += self.connector.adopt_state(sequence, depth, state)
        self.scheduler.roster.waiting.release(sequence)

    def finish(self, rank: OracleRank) -> None:
        self.watch()
        while self.pins:
            self.write(rank)
        while self.fetches:
            self.arrive(rank)

    @property
    def hosts(self) -> Counter[int]:
        """Host pages that neither pool nor tree has."""
        tree, tier = self.scheduler.cache.tree, self.scheduler.cache.host
        orphans = {
            pin.node: pin.host
            for pin in self.pins
            if isinstance(pin, Pin) and pin.tree is tree and not pin.is_current
        }
        reserved = [one.reserved for one in self.fetches if one.reserved.tier is tier]
        return Counter(orphans.values()) + Counter(host for one in reserved for host in one.hosts)

    def num_pins(self, node: object) -> int:
        return sum(isinstance(pin, Pin) and pin.node is node for pin in self.pins)
