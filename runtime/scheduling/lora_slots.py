"""Which adapters sit on the device, and who waits for one to sit down. Pure.

A running sequence keeps its adapter's seat; a seat that nobody uses keeps its adapter until another one wants
it. So a step never mixes more adapters than there are seats. A sequence whose adapter finds no seat waits
aside, and others pass it whose adapters sit or who need none. Nobody waits for ever: when PATIENCE have
started meanwhile, the seat that fewest use is closed to newcomers, who line up behind. Seats that become free
go to whoever waits longest, with all that want the same adapter.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.messages.lora import LoraAssignment
from runtime.scheduling.waiting import WaitingQueue

PATIENCE = 32


class LoraSlotConfig(Struct, frozen=True, kw_only=True):
    """What the options say of seats."""

    num_lora_slots: int = 0
    # or fifo: of adapters that nobody uses, who goes: the one not asked for longest, or that sat down first
    eviction: str = "lru"


class LoraSlot(Struct):
    """A place on the device and the adapter there."""

    index: int
    num_users: int = 0  # running sequences
    is_pinned: bool = False  # its adapter stays
    is_closed: bool = False  # to newcomers
    kept_for: list[Any] = []  # sequences that waited for it and have not started yet

    @property
    def is_idle(self) -> bool:
        """Another adapter may have it."""
        if self.num_users or self.is_pinned:
            return False
        return self.is_closed or all(s.is_finished for s in self.kept_for)


class LoraSlots:
    """All of them. `waiting` is changed here only."""

    def __init__(self, config: LoraSlotConfig) -> None:
        self.config = config
        self.waiting: list[Sequence] = []  # aside, for a seat
        self.num_placed = 0  # adapters that sat down, ever
        self.num_evicted = 0  # of those that stood up for them
        self._leaving: set[int] = set()  # adapters that are unloaded when their last sequence ends
        self._passed = 0  # sequences that started while others waited
        self.restart()

    def restart(self) -> None:
        """New ranks: all seats are empty, and nobody runs."""
        self._free = list(range(self.config.num_lora_slots - 1, -1, -1))
        self._taken: dict[int, LoraSlot] = {}  # by adapter; who goes first stands first
        self._moved: dict[int, int] = {}  # adapter by seat, to be told to the ranks
        self._gone: list[int] = []

    @property
    def num_taken(self) -> int:
        """Seats that have an adapter."""
        return len(self._taken)

    @property
    def num_used(self) -> int:
        """Of those, the ones that running sequences use."""
        return sum(lora_slot.num_users > 0 for lora_slot in self._taken.values())

    def can_take_slot(self, sequence: Sequence) -> bool:
        """Whether its adapter sits or finds a seat."""
        adapter = sequence.request.adapter
        assert adapter is not None, "the plain model needs no seat"
        if (lora_slot := self._taken.get(adapter.id)) is not None:
            return not lora_slot.is_closed
        return not self.waiting and self._has_room()

    def head(self, queue: WaitingQueue) -> Sequence | None:
        """Who is next of those that may start, as far as adapters go; who may not waits aside."""
        while (sequence := queue.head()) is not None:
            if sequence.request.adapter is None or self.can_take_slot(sequence):
                return sequence
            queue.suspend(sequence)
            if not self.waiting:
                self._passed = 0
            self.waiting.append(sequence)
        return None

    def release(self, queue: WaitingQueue) -> None:
        """Seats for those that wait, as far as there are; they take their turn again. To be called before
        anybody is let in."""
        if not self.waiting:
            return
        keeps = not queue.admits_only  # who may not start must not keep others from it
        while self.waiting:
            adapter = self.waiting[0].request.adapter
            assert adapter is not None, "the plain model needs no seat"
            group = [s for s in self.waiting if s.request.adapter == adapter and not s.is_finished]
            lora_slot = self._taken.get(adapter.id)
            if group and lora_slot is None:
                if not self._has_room():
                    return
                lora_slot = self._place(adapter.id, is_pinned=adapter.is_pinned)
            if lora_slot is not None:
                lora_slot.is_closed = False
                lora_slot.kept_for = group if keeps else []
            self.waiting = [s for s in self.waiting if s.request.adapter != adapter]
            for sequence in group:
                queue.release(sequence)
        for lora_slot in self._taken.values():
            lora_slot.is_closed = False

    def sit(self, sequence: Sequence) -> None:
        """It starts."""
        if self.waiting:
            self.waiting = [s for s in self.waiting if s is not sequence]
            self._passed += 1
            if self._passed >= PATIENCE:
                self._close()
        if (adapter := sequence.request.adapter) is None:
            return
        lora_slot = self._taken.get(adapter.id)
        if lora_slot is None:
            lora_slot = self._place(adapter.id, is_pinned=adapter.is_pinned)
        elif self.config.eviction == "lru":
            self._taken[adapter.id] = self._taken.pop(adapter.id)
        lora_slot.num_users += 1
        if lora_slot.kept_for:
            lora_slot.kept_for = [s for s in lora_slot.kept_for if s is not sequence]

    def leave(self, sequence: Sequence) -> None:
        """It runs no longer."""
        if (adapter := sequence.request.adapter) is not None:
            self._taken[adapter.id].num_users -= 1

    def unload(self, adapter: int, live: Iterable[Sequence]) -> None:
        """No request comes for it any more; the ranks forget it when the last of `live` that has it has
        ended."""
        if any(s.request.adapter is not None and s.request.adapter.id == adapter for s in live):
            self._leaving.add(adapter)
            return
        self._leaving.discard(adapter)
        self._gone.append(adapter)
        if (lora_slot := self._taken.pop(adapter, None)) is not None:
            self._moved.pop(lora_slot.index, None)
            self._free.append(lora_slot.index)

    def ended(self, adapter: int, live: Iterable[Sequence]) -> None:
        """A sequence that had it is not among `live` any more."""
        if adapter in self._leaving:
            self.unload(adapter, live)

    def index(self, sequence: Sequence) -> int:
        """Where the adapter of a running sequence sits; -1: it has none."""
        adapter = sequence.request.adapter
        return -1 if adapter is None else self._taken[adapter.id].index

    def take(self) -> LoraAssignment | None:
        """What the next plan must tell the ranks."""
        if not self._moved and not self._gone:
            return None
        moved, gone, self._moved, self._gone = self._moved, self._gone, {}, []
        return LoraAssignment(
            np.array(list(moved), np.int32),
            np.array(list(moved.values()), np.int32),
            np.array(gone, np.int32),
        )

    def _has_room(self) -> bool:
        return bool(self._free) or any(lora_slot.is_idle for lora_slot in self._taken.values())

    def _place(self, adapter: int, *, is_pinned: bool) -> LoraSlot:
        if not self._free:
            gone, old = next(
                (gone, lora_slot) for gone, lora_slot in self._taken.items() if lora_slot.is_idle
            )
            del self._taken[gone]
            self._free.append(old.index)
            self.num_evicted += 1
        lora_slot = self._taken[adapter] = LoraSlot(self._free.pop(), is_pinned=is_pinned)
        self._moved[lora_slot.index] = adapter
        self.num_placed += 1
        return lora_slot

    def _close(self) -> None:
        """Of the seats that can change hands, the one that will soonest, unless one is closed already."""
        lora_slots = [lora_slot for lora_slot in self._taken.values() if not lora_slot.is_pinned]
        if lora_slots and not any(lora_slot.is_closed for lora_slot in lora_slots):
            min(lora_slots, key=lambda lora_slot: lora_slot.num_users).is_closed = True
