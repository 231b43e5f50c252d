"""State slots for recurrent layers (state-space, linear attention, delta rules), which fold all tokens so far
into one state.

A running sequence owns one slot: each of its steps starts from the state there and leaves the new one there.
A node of the tree may keep the state after its last token, so a prefix can be continued where a node has one:
it is copied into the newcomer's slot, and the node's own stays as it is. Where states are kept:

- at the ends of a prompt's chunks, which the planner cuts at page boundaries: at the last one before the prompt's end, and where the
  tree knew the tokens of a sequence but had no state (`stops`)
- where a sequence stops exactly at a page boundary: the node takes its slot over
- with an interval, while a sequence decodes: it owns a second slot, and every so many tokens the state is copied there. The tree gets it
  when the sequence leaves, for only then does it know the tokens

Copies are orders to the ranks (moves.StateCopies), those from kept states before a step's forward and those
that keep states after it. So what a plan keeps only later plans may use: it is kept when no newcomer is
admitted any more (`computed`). Slots change hands when a plan is made, as pages do (kv.py): a slot that a
plan frees may be written by the same plan, whose loads read what the steps before have left.
"""

import numpy as np
from msgspec import Struct

from runtime.cache.groups import Idle
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.messages.steps import StateCopies
from runtime.scheduling.sequence import Sequence


class StateConfig(Struct, frozen=True, kw_only=True):
    """`num_slots` of the pool, the padding slot 0 included; 0: the model has no recurrent layers."""

    num_slots: int = 0
    # tokens between two kept states while a sequence decodes, whole pages; 0: none are kept then
    interval: int = 0
    shares: bool = True  # False: there is no tree to keep states in


class Held:
    """What a running sequence owns."""

    __slots__ = ("slot", "second", "second_len", "lacking")

    def __init__(self, slot: int, lacking: Node | None) -> None:
        self.slot = slot
        self.second = 0  # a state for later; 0: none
        self.second_len = 0  # tokens of it
        self.lacking = lacking  # the tree knew tokens up to here, but no state

    @property
    def own(self) -> list[int]:
        return [self.slot, self.second] if self.second else [self.slot]


class StatePool:
    """Every slot is free, a node's, or one sequence's own."""

    kind = "state slot"
    field = "state"

    def __init__(self, config: StateConfig, page_size: int) -> None:
        self.config = config
        self.page_size = page_size
        self.pool = PagePool(config.num_slots)
        self._idle = Idle()
        # who has a second slot; newcomers take them when nothing else is left
        self._seconds: dict[Held, None] = {}
        self._loads: list[tuple[int, int]] = []  # of this plan: from, to
        self._keeps: dict[int, int] = {}  # of this plan: to, from

    @property
    def has_room(self) -> bool:
        """Whether a newcomer can have a slot now."""
        return bool(self.pool.num_free or len(self._idle) or self._seconds)

    @property
    def num_idle(self) -> int:
        """Slots that the tree has."""
        return len(self._idle)

    def take(self, owners: list[tuple[int, int]]) -> StateCopies | None:
        """The plan is complete: its copies. `owners`: sequences' slots on the ranks, and their state
        slots."""
        if not (owners or self._keeps):  # loads come with owners
            return None
        keeps = [(source, to) for to, source in self._keeps.items()]
        page_copies = StateCopies(
            *(
                np.array([pair[i] for pair in pairs], dtype=np.int32)
                for pairs in (owners, self._loads, keeps)
                for i in (0, 1)
            )
        )
        self._loads, self._keeps = [], {}
        return page_copies

    # ── sequences ──────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, sequence: Sequence, match: Node) -> None:
        """The sequence takes a slot, with the state of the node that it goes on from; the caller has checked
        `has_room`."""
        node = sequence.node
        source = node.state
        # used now, so that others go first; where there are none, the sequence takes over the slot itself
        if source:
            self._idle.remove(node)
            self._idle.add(node, is_end=True)
        slot = self._take()
        if not slot:
            held = next(iter(self._seconds))  # who has had it longest
            del self._seconds[held]
            slot, held.second = held.second, 0
            self._keeps.pop(slot, None)  # it was to be kept by this very plan
        if slot != source:
            self._loads.append((source, slot))
        sequence.state = Held(slot, match if match.depth > node.depth else None)

    def stops(self, sequence: Sequence) -> list[int]:
        """Positions where its chunks should end."""
        if not self.config.shares:
            return []
        lacking = sequence.state.lacking
        ends = [(len(sequence.tokens) - 1) // self.page_size * self.page_size]
        return ends if lacking is None else [lacking.depth * self.page_size, *ends]

    def cut(self, sequence: Sequence, count: int, *, is_begun: bool) -> int:
        """How many of the next `count` known tokens to compute in this step: up to a place where a state is
        kept. `is_begun`: the step computes tokens before these."""
        start = sequence.computed_len
        end = start + count
        for stop in self.stops(sequence):
            if is_begun and stop == start:
                return 0
            if start < stop < end:
                return stop - start
        if end == len(sequence.tokens) or not self.config.shares:
            return count
        whole = end // self.page_size * self.page_size
        if whole > start:
            return whole - start
        return 0 if is_begun and not start % self.page_size else count

    def computed(self, sequence: Sequence) -> None:
        """The step computes known tokens up to `computed_len`: the state there is kept. To be called when
        nobody is admitted any more, and the tree has got what it will."""
        depth, rest = divmod(sequence.computed_len, self.page_size)
        if rest or not self.config.shares:
            return
        held = sequence.state
        node = sequence.node if sequence.node.depth == depth else held.lacking
        is_end = sequence.computed_len in self.stops(sequence) or sequence.computed_len == len(
            sequence.tokens
        )
        if node is None or node.depth != depth or not node.page:
            if is_end:
                self._keep_second(held, sequence.computed_len)
        elif not node.state and (slot := self._take()):
            node.state = slot
            self._idle.add(node, is_end=is_end)
            self._keeps[slot] = held.slot

    def decoded(self, sequences: list[Sequence], starts: list[int]) -> None:
        """A step computes the tokens at `starts`."""
        interval = self.config.interval
        if interval and self.config.shares:
            for sequence, start in zip(sequences, starts, strict=True):
                if not (start + 1) % interval:
                    self._keep_second(sequence.state, start + 1)

    def leave(self, sequence: Sequence) -> None:
        """Nodes that have no state take those of the sequence over."""
        held = sequence.state
        for slot, length in ((held.slot, sequence.computed_len), (held.second, held.second_len)):
            if not slot:
                continue
            depth, rest = divmod(length, self.page_size)
            node = sequence.node
            while node.depth > depth:
                node = node.parent
            if (
                rest
                or not depth
                or node.depth != depth
                or not node.page
                or node.state
                or not self.config.shares
            ):
                self._release(slot)
            else:
                node.state = slot
                self._idle.add(node, is_end=True)
        self._seconds.pop(held, None)
        sequence.state = None

    # ── the tree ───────────────────────────────────────────────────────────────────────────────────────────────

    def usable(self, node: Node) -> Node:
        while node.parent is not None and not node.state:
            node = node.parent
        return node

    def drop(self, node: Node) -> None:
        self._idle.remove(node)
        self._release(node.state)
        node.state = 0

    def _keep_second(self, held: Held, length: int) -> None:
        if not self.config.interval:
            return
        if not held.second:
            held.second = self._take()
            if not held.second:
                return
            self._seconds[held] = None
        held.second_len = length
        self._keeps[held.second] = held.slot

    def _take(self) -> int:
        """A slot that is free or that a node gives up; 0: there is none."""
        if not self.pool.num_free:
            if not len(self._idle):
                return 0
            self.drop(self._idle.next())
        return self.pool.allocate(1)[0]

    def _release(self, slot: int) -> None:
        self._keeps.pop(slot, None)  # it was to be kept by this very plan
        self.pool.release([slot])


def open_states(config: StateConfig, page_size: int) -> StatePool | None:
    """An empty pool, where there is one."""
    return StatePool(config, page_size) if config.num_slots else None
