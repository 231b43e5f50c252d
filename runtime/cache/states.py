"""State slots of recurrent layers (state-space, linear attention, delta rules), which fold all tokens so far
into one state.

A running sequence owns one slot: each of its steps starts from the state there and leaves the new state
there. A node of the prefix tree may keep the state after its last token, so that a prefix can be continued
there: the state is copied into the new sequence's slot, and the node's own does not change. States are kept

- at the ends of prefill chunks, which the planner cuts at page boundaries (`stops`): the last one before the
  prompt's end, and the depth down to which the tree matched tokens but had no state
- where a sequence stops exactly at a page boundary: the node takes over its slot
- with an interval, while a sequence decodes: it owns a second slot for a snapshot, which is renewed every
  so many tokens. The tree gets it when the sequence leaves, because only then does it have the tokens. A
  row of drafts renews it if it brings the sequence to that length, which its result says

Copies are part of a step's plan (messages/steps.py, StateCopies): those from kept states come before the
step's forward pass, those that keep states after it. So only later plans may use what a plan keeps; states
are kept when no more sequences are admitted to the plan (`computed`). Slots change owners when a plan is
made, as pages do (kv.py): a plan may write to a slot that it frees, since its loads read what earlier steps
have left.
"""

import numpy as np
from msgspec import Struct, structs

from runtime.cache.groups import EvictableNodes
from runtime.cache.host_states import HostStates
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.sequence import Sequence
from runtime.messages.steps import StateCopies


class StateConfig(Struct, frozen=True, kw_only=True):
    """Size of the pool. `num_slots` includes the padding slot 0; 0: the model has no recurrent layers."""

    num_slots: int = 0
    # tokens between two snapshots while a sequence decodes, a multiple of the page size; 0: no snapshots
    interval: int = 0
    shares: bool = True  # False: there is no prefix cache that could keep states
    # tokens in a step's rows of drafts that may be refused, for which the ranks have memory
    draft_nodes: int = 0


class SequenceState:
    """State slots that a running sequence owns."""

    __slots__ = ("slot", "snapshot", "snapshot_len", "awaited", "lacking")

    def __init__(self, slot: int, lacking: Node | None) -> None:
        self.slot = slot
        self.snapshot = 0  # slot of a state that is kept for later; 0: none
        self.snapshot_len = 0  # tokens that the snapshot covers
        # of each row of drafts in flight: the length at which it may renew the snapshot; 0: it does not
        self.awaited: list[int] = []
        self.lacking = lacking  # the tree matched tokens down to this node, but had no state there

    def landed(self, start: int, count: int) -> None:
        """The oldest row of drafts in flight, before which the sequence had `start` tokens, has brought it
        `count` further."""
        if start < (at := self.awaited.pop(0)) <= start + count:
            self.snapshot_len = at

    @property
    def own(self) -> list[int]:
        """The state slots that the sequence has."""
        return [self.slot, self.snapshot] if self.snapshot else [self.slot]


class StatePool:
    """The CacheGroup of state slots."""

    kind = "state slot"
    field = "state"

    def __init__(self, config: StateConfig, page_size: int, hosts: HostStates | None = None) -> None:
        """`hosts`: copies in host memory; None: there are none."""
        self.config = config
        self.hosts = hosts
        self.draft_nodes = config.draft_nodes
        self.page_size = page_size
        self.pool = PagePool(config.num_slots)
        self._evictable = EvictableNodes()
        # owners of a snapshot; newly admitted sequences take these slots when there is no other
        self._snapshots: dict[SequenceState, None] = {}
        self._loads: list[tuple[int, int]] = []  # copies before this plan's forward pass: from, to
        # copies after this plan's forward pass: to, from and length (-1: what the row leaves)
        self._keeps: dict[int, tuple[int, int]] = {}

    @property
    def has_room(self) -> bool:
        """Whether a sequence that is admitted now can have a slot."""
        return bool(self.pool.num_free or len(self._evictable) or self._snapshots)

    @property
    def num_evictable(self) -> int:
        """Slots of nodes."""
        return len(self._evictable)

    def take(self, owners: list[tuple[int, int]], step: int) -> StateCopies | None:
        """The copies of the plan, which is complete and becomes `step`. `owners`: the slots of sequences on
        the ranks, and their state slots."""
        hosts = None if self.hosts is None else self.hosts.take(step)
        if not (owners or self._keeps or hosts):  # loads come with owners
            return None
        keeps = [(source, to, at) for to, (source, at) in self._keeps.items()]
        state_copies = StateCopies(
            *(
                np.array([entry[i] for entry in entries], dtype=np.int32)
                for entries, size in ((owners, 2), (self._loads, 2), (keeps, 3))
                for i in range(size)
            )
        )
        self._loads, self._keeps = [], {}
        return state_copies if hosts is None else structs.replace(state_copies, **structs.asdict(hosts))

    # ── sequences ──────────────────────────────────────────────────────────────────────────────────────

    def start(self, sequence: Sequence, match: Node) -> None:
        """See CacheGroup.start. The sequence takes a slot, with the state of the node that it continues from;
        the caller has checked `has_room`."""
        node = sequence.node
        assert node is not None
        source = node.state
        # most recently used, so that others are evicted first; if there are none, the sequence takes over the
        # slot
        place = 0
        if source:
            self._evictable.remove(node)
            self._evictable.add(node, is_end=True)
            if self.hosts is not None:
                self.hosts.used(node)
        elif self.hosts is not None and node.host_state:
            place = self.hosts.hold(node)
        slot = self._take()
        if not slot:
            held = next(iter(self._snapshots))  # the oldest owner
            del self._snapshots[held]
            slot, held.snapshot = held.snapshot, 0
            held.awaited = [0] * len(held.awaited)
            self._keeps.pop(slot, None)  # this plan was to write it
        if place and self.hosts is not None:
            self.hosts.fetch(place, slot)
        elif slot != source:
            self._loads.append((source, slot))
        sequence.state = SequenceState(slot, match if match.depth > node.depth else None)

    def stops(self, sequence: Sequence) -> list[int]:
        """Positions where the sequence's prefill chunks should end."""
        if not self.config.shares:
            return []
        lacking = held_by(sequence).lacking
        ends = [(len(sequence.tokens) - 1) // self.page_size * self.page_size]
        return ends if lacking is None else [lacking.depth * self.page_size, *ends]

    def cut(self, sequence: Sequence, count: int, *, is_begun: bool) -> int:
        """How many of the next `count` known tokens to compute in this step, so that it ends where a state is
        kept. `is_begun`: the step computes tokens of the sequence before these."""
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
        """Keeps the state at `computed_len`, up to which the step computes known tokens. To be called when no
        more sequences are admitted to the plan, and the plan's pages have been published."""
        depth, rest = divmod(sequence.computed_len, self.page_size)
        if rest or not self.config.shares:
            return
        held, node = held_by(sequence), sequence.node
        if node is not None and node.depth != depth:
            node = held.lacking
        is_end = sequence.computed_len in self.stops(sequence) or sequence.computed_len == len(
            sequence.tokens
        )
        if node is None or node.depth != depth or not node.page:
            if is_end and self._keep_snapshot(held):
                held.snapshot_len = sequence.computed_len
        elif not node.state and (slot := self._take()):
            node.state = slot
            self._evictable.add(node, is_end=is_end)
            self._keeps[slot] = held.slot, -1
            if self.hosts is not None and is_end:
                self.hosts.kept(node)

    def decoded(self, sequences: list[Sequence], starts: list[int]) -> None:
        """Takes snapshots of sequences that decode; the step computes their tokens at `starts`, which are
        certain."""
        interval = self.config.interval
        if interval and self.config.shares:
            for sequence, start in zip(sequences, starts, strict=True):
                held = held_by(sequence)
                if not (start + 1) % interval and self._keep_snapshot(held):
                    held.snapshot_len = start + 1

    def drafted(self, sequence: Sequence, num_drafts: int) -> None:
        """A row of so many drafts is about to be planned: it renews the snapshot, if it gets there."""
        interval, held = self.config.interval, held_by(sequence)
        most, at = sequence.computed_len + sequence.drafting + 1 + num_drafts, 0
        if interval and self.config.shares:
            at = (sequence.computed_len // interval + 1) * interval
        held.awaited.append(at if 0 < at <= most and self._keep_snapshot(held, at) else 0)

    def leave(self, sequence: Sequence) -> None:
        """See CacheGroup.leave. Nodes without a state take over those of the sequence, where it is known
        which tokens these cover."""
        held = held_by(sequence)
        known_len = 0 if sequence.drafting else sequence.computed_len
        snapshot_len = 0 if any(held.awaited) else held.snapshot_len
        for slot, length in ((held.slot, known_len), (held.snapshot, snapshot_len)):
            if not slot:
                continue
            depth, rest = divmod(length, self.page_size)
            node = sequence.node
            while node is not None and node.depth > depth:
                node = node.parent
            if (
                rest
                or not depth
                or node is None
                or node.depth != depth
                or not node.page
                or node.state
                or not self.config.shares
            ):
                self._release(slot)
            else:
                node.state = slot
                self._evictable.add(node, is_end=True)
                if self.hosts is not None:
                    self.hosts.kept(node)
        self._snapshots.pop(held, None)
        sequence.state = None

    # ── the tree ───────────────────────────────────────────────────────────────────────────────────────

    def usable(self, node: Node) -> Node:
        """See CacheGroup.usable."""
        while node.parent is not None and not (node.state or (self.hosts is not None and node.host_state)):
            node = node.parent
        return node

    def drop(self, node: Node) -> None:
        """See CacheGroup.drop."""
        self._evictable.remove(node)
        self._release(node.state)
        node.state = 0

    def _keep_snapshot(self, held: SequenceState, at: int = -1) -> bool:
        """The plan renews the snapshot: with the state that the sequence's row leaves, or if it gets there
        the one at length `at`. False: it has no slot, or the cache keeps no snapshots."""
        if not self.config.interval:
            return False
        if not held.snapshot:
            held.snapshot, held.snapshot_len = self._take(), 0
            if not held.snapshot:
                return False
            self._snapshots[held] = None
        self._keeps[held.snapshot] = held.slot, at
        return True

    def _take(self) -> int:
        """A slot that is free or evicted from a node; 0: there is none."""
        if not self.pool.num_free:
            if not len(self._evictable):
                return 0
            node = self._evictable.next()
            if self.hosts is not None:
                is_end = self._evictable.is_end(node)
                self.hosts.leaving(node, is_wanted=is_end and node.state not in self._keeps)
            self.drop(node)
        return self.pool.allocate(1)[0]

    def _release(self, slot: int) -> None:
        self._keeps.pop(slot, None)  # this plan was to write it
        self.pool.release([slot])


def held_by(sequence: Sequence) -> SequenceState:
    """State slots of a running sequence."""
    assert sequence.state is not None, "the sequence is not running"
    return sequence.state


def open_states(config: StateConfig, page_size: int, hosts: HostStates | None = None) -> StatePool | None:
    """An empty pool; None if the model has no recurrent layers. `hosts`: copies in host memory."""
    return StatePool(config, page_size, hosts) if config.num_slots else None
