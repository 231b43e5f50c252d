"""Which LoRA adapters are on the device, in how many LoRA slots, and which sequences wait for a slot. Pure.

A running sequence keeps its adapter's slot. A slot without running sequences keeps its adapter until another
adapter needs it, so a step never mixes more adapters than there are slots. A sequence whose adapter finds no
slot is set aside, and others pass it whose adapters have one or who need none. No sequence waits for ever:
when PATIENCE others have started meanwhile, the slot with the fewest users is closed to new sequences. Slots
that become free go to the adapter of the sequence that has waited longest.
"""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.messages.lora import LoraAssignment
from runtime.scheduling.waiting import WaitingQueue

PATIENCE = 32


class LoraSlotConfig(Struct, frozen=True, kw_only=True):
    """LoRA slots as the options have them."""

    num_lora_slots: int = 0
    # which unused adapter is evicted: the least recently used one, or (fifo) the one loaded first
    eviction: str = "lru"


class LoraSlot(Struct):
    """One LoRA slot and its adapter."""

    index: int
    num_users: int = 0  # running sequences
    is_pinned: bool = False  # its adapter stays
    is_closed: bool = False  # to newcomers
    kept_for: list[Sequence] = []  # sequences that waited for it and have not started yet

    @property
    def is_idle(self) -> bool:
        """Another adapter may have it."""
        if self.num_users or self.is_pinned:
            return False
        return self.is_closed or all(s.is_finished for s in self.kept_for)


class LoraSlots:
    """All LoRA slots. `waiting` is changed here only."""

    def __init__(self, config: LoraSlotConfig) -> None:
        self.config = config
        self.waiting: list[Sequence] = []  # set aside until a slot is free
        self.num_placed = 0  # adapters that were given a slot
        self.num_evicted = 0  # adapters that lost their slot to another
        self._leaving: set[int] = set()  # adapters that are unloaded when their last sequence ends
        self._passed = 0  # sequences that started while others waited
        self.restart()

    def restart(self) -> None:
        """New ranks: all slots are empty, and no sequence runs."""
        self._free = list(range(self.config.num_lora_slots - 1, -1, -1))
        self._taken: dict[int, LoraSlot] = {}  # by adapter, in order of eviction
        self._moved: dict[int, int] = {}  # adapter by slot, for the next plan
        self._gone: list[int] = []

    @property
    def num_taken(self) -> int:
        """Slots that have an adapter."""
        return len(self._taken)

    @property
    def used_adapters(self) -> list[int]:
        """Adapters that running sequences use, each in its slot."""
        return [adapter for adapter, lora_slot in self._taken.items() if lora_slot.num_users > 0]

    def can_take_slot(self, sequence: Sequence) -> bool:
        """Whether its adapter has a slot or finds one."""
        adapter = sequence.request.adapter
        assert adapter is not None, "the base model needs no LoRA slot"
        if (lora_slot := self._taken.get(adapter.id)) is not None:
            return not lora_slot.is_closed
        return not self.waiting and self._has_room()

    def head(self, queue: WaitingQueue) -> Sequence | None:
        """The next sequence that may start, as far as adapters go; those before it that may not are set
        aside."""
        while (sequence := queue.head()) is not None:
            if sequence.request.adapter is None or self.can_take_slot(sequence):
                return sequence
            queue.suspend(sequence)
            if not self.waiting:
                self._passed = 0
            self.waiting.append(sequence)
        return None

    def release(self, queue: WaitingQueue) -> None:
        """Gives free slots to sequences that were set aside; they are queued again. To be called before
        sequences are admitted."""
        if not self.waiting:
            return
        keeps = not queue.admits_only  # sequences that may not start must not keep slots from others
        while self.waiting:
            adapter = self.waiting[0].request.adapter
            assert adapter is not None, "the base model needs no LoRA slot"
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

    def acquire(self, sequence: Sequence) -> None:
        """The sequence starts: its adapter takes a slot, if it has none."""
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
        """The sequence does not run any more."""
        if (adapter := sequence.request.adapter) is not None:
            self._taken[adapter.id].num_users -= 1

    def unload(self, adapter: int, live: Iterable[Sequence]) -> None:
        """No request names this adapter any more; the ranks forget it when the last of `live` that has it has
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
        """A sequence with this adapter has ended; `live` are those that have not."""
        if adapter in self._leaving:
            self.unload(adapter, live)

    def index(self, sequence: Sequence) -> int:
        """The LoRA slot of a running sequence's adapter; -1: it has no adapter."""
        adapter = sequence.request.adapter
        return -1 if adapter is None else self._taken[adapter.id].index

    def take(self) -> LoraAssignment | None:
        """Changes of the assignment since the last plan, for the next one."""
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
        """Closes the unpinned slot with the fewest users, unless one is closed already."""
        lora_slots = [lora_slot for lora_slot in self._taken.values() if not lora_slot.is_pinned]
        if lora_slots and not any(lora_slot.is_closed for lora_slot in lora_slots):
            min(lora_slots, key=lambda lora_slot: lora_slot.num_users).is_closed = True
