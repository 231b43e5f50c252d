"""A storage tier that remembers everything, between a scheduler and an oracle rank, and takes its time."""

from collections import Counter

import numpy as np

from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import Pin, Reserved, StorageConnector
from runtime.scheduling.scheduler import Scheduler
from tests.scheduling.oracle import OracleRank


class Shelf:
    """Pages by key, and what is under way."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.connector = StorageConnector(lambda: scheduler.cache, b"a model")
        self.pages: dict[bytes, np.ndarray] = {}
        self.pins: list[Pin] = []
        self.fetches: list[tuple[Sequence, int, list[bytes], Reserved]] = []
        self.num_adopted = 0

    def watch(self) -> None:
        self.pins += self.connector.confirmed()

    def write(self, rank: OracleRank) -> None:
        """The oldest page that waits for it."""
        pin = self.pins.pop(0)
        if pin.tree is self.scheduler.cache.tree:
            assert pin.host not in rank.touched(self.scheduler.last_step, loads=False), (
                "a step in flight overwrites what is read"
            )
            page = rank.host[pin.host].copy()
            assert page.min() >= 0 and (pin.key not in self.pages or (self.pages[pin.key] == page).all())
            self.pages[pin.key] = page
        pin.release()

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
        self.fetches.append((sequence, wanted.first, wanted.keys[: len(reserved.hosts)], reserved))

    def arrive(self, rank: OracleRank, part: float = 1.0) -> None:
        """The oldest fetch is done, or given up after some pages."""
        sequence, first, keys, reserved = self.fetches.pop(0)
        count = int(len(keys) * part)
        if reserved.tier is self.scheduler.cache.host:
            for host, key in zip(reserved.hosts[:count], keys, strict=False):
                rank.host[host] = self.pages[key]
        self.num_adopted += self.connector.adopt(sequence, first, reserved, count)
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
        orphans = {pin.node: pin.host for pin in self.pins if pin.tree is tree and not pin.is_current}
        reserved = [host for *_, reserved in self.fetches if reserved.tier is tier for host in reserved.hosts]
        return Counter(orphans.values()) + Counter(reserved)

    def num_pins(self, node: object) -> int:
        return sum(pin.node is node for pin in self.pins)
