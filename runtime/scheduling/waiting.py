"""The waiting queue: which sequence is admitted next.

1. a sequence that has been overtaken too often (ageing), at most every AGED_EVERY-th time
2. the best level (priority)
3. within it, the tenant that has got least (fair shares)
4. within that, sequences that ran before and were preempted; then by policy (order.py)
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping

from msgspec import Struct

from runtime.cache.prefix import PrefixTree
from runtime.cache.sequence import Sequence
from runtime.scheduling.order import POLICIES, WINDOW, Now, Policy
from runtime.scheduling.shares import Shares

# at least so many admissions by policy between two by age: priorities keep a meaning under permanent overload
AGED_EVERY = 8
AGED_LEVEL = -(2**63) - 1  # before every priority: who was admitted by age is not preempted by priority
LAST_LEVEL = 2**63  # after every priority
IDLE_LEVEL = 2**64  # after everybody, and by more than any threshold


class OrderConfig(Struct, frozen=True, kw_only=True):
    """The order of the queue as the options have it."""

    policy: str = "fcfs"
    has_priorities: bool = False
    low_first: bool = False  # the lower number is the higher priority
    # levels that a running sequence must be worse by to give way to a waiting one
    preemption_threshold: int = 10
    patience: int = 256  # later sequences that may overtake one; 0: any number
    fair: bool = False  # fair shares among tenants
    weights: Mapping[str, float] = {}  # of tenants; 1 where none is given

    def level(self, priority: int | None, *, is_idle: bool = False) -> int:
        """The level of a request: the smaller, the sooner it is taken. `is_idle`: it runs in idle time
        only."""
        if is_idle:
            return IDLE_LEVEL
        if not self.has_priorities:
            return 0
        if priority is None:
            return LAST_LEVEL
        return priority if self.low_first else -priority


LaneItem = tuple[bool, int, int, Sequence]  # is new, key, id, sequence: as lanes are sorted


class Lane:
    """Waiting sequences of one level and tenant: those that ran before, then by the policy's key."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.entries: list[LaneItem] = []  # sorted
        self._ranked: list[Sequence] = []  # what `rank` made of the first few, the next one last
        self._ranked_in = -1

    def add(self, sequence: Sequence, *, is_new: bool) -> LaneItem:
        """Sorts a sequence in. -> what `remove` takes"""
        entry = (is_new, self.policy.key(sequence) if is_new else 0, sequence.id, sequence)
        insort(self.entries, entry)
        self._ranked_in = -1
        return entry

    def remove(self, entry: LaneItem) -> None:
        """Takes out what `add` returned."""
        del self.entries[bisect_left(self.entries, entry)]
        if self._ranked and self._ranked[-1] is entry[3]:
            self._ranked.pop()
        else:
            self._ranked_in = -1

    def head(self, turn: int, now: Now) -> Sequence:
        """The next sequence. Policies rank once a turn, or when the lane has changed."""
        first = self.entries[0]
        if self.policy.rank is None or not first[0] or len(self.entries) == 1:
            return first[3]
        if self._ranked_in != turn or not self._ranked:
            self._ranked_in = turn
            self._ranked = self.policy.rank([entry[3] for entry in self.entries[:WINDOW]], now)
            self._ranked.reverse()
        return self._ranked[-1]


class QueueEntry(Struct):
    """A waiting sequence in its lane."""

    ordinal: int  # how many entered the queue before it
    lane: tuple[int, str]
    item: LaneItem


class WaitingQueue:
    """Sequences without slot and pages. `turn` counts the plans: what a policy has ranked holds for one."""

    def __init__(self, order: OrderConfig, now: Now, shares: Shares) -> None:
        self.order = order
        self.turn = 0
        self.num_aged = 0  # admitted by age
        # ids of the only requests that may be taken; while empty, all may
        self.admits_only: frozenset[str] = frozenset()
        self._policy = POLICIES[order.policy]
        self._now = now
        self._shares = shares
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._entries: OrderedDict[int, QueueEntry] = OrderedDict()  # by id, in order of entry
        self._suspended: dict[int, Sequence] = {}
        self._entered = 0
        self._left = 0
        self._last_aged = -AGED_EVERY

    def __len__(self) -> int:
        return len(self._entries) + len(self._suspended)

    @property
    def num_tokens(self) -> int:
        """Known tokens of all waiting sequences; takes time in their number."""
        return sum(len(entry.item[3].tokens) for entry in self._entries.values()) + sum(
            len(s.tokens) for s in self._suspended.values()
        )

    @property
    def has_ready(self) -> bool:
        """Whether a sequence waits for its turn alone."""
        return bool(self._entries)

    def add(self, sequence: Sequence, *, is_new: bool = True) -> None:
        """The sequence can run from now on. Not `is_new`: it ran before, and was preempted."""
        self._suspended.pop(sequence.id, None)
        key = (sequence.level, self._shares.tenant(sequence.request.tenant))
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(self._policy)
        self._entries[sequence.id] = QueueEntry(self._entered, key, lane.add(sequence, is_new=is_new))
        self._entered += 1

    def add_suspended(self, sequence: Sequence) -> None:
        """The sequence waits for something other than its turn, until `add`."""
        self._suspended[sequence.id] = sequence

    def suspend(self, sequence: Sequence) -> None:
        """A sequence that waits for its turn waits for something else first, until `release`."""
        if sequence.id in self._entries:
            self.remove(sequence)
            self._left -= 1
            self.add_suspended(sequence)

    def release(self, sequence: Sequence) -> None:
        """A suspended sequence waits for its turn; it may have ended meanwhile."""
        if self.holds(sequence):
            self.add(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence is suspended."""
        return sequence.id in self._suspended

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence leaves."""
        if self._suspended.pop(sequence.id, None) is None:
            entry = self._entries.pop(sequence.id)
            lane = self._lanes[entry.lane]
            lane.remove(entry.item)
            if not lane.entries:
                del self._lanes[entry.lane]
            self._left += 1
        sequence.match = None

    def take(self, sequence: Sequence) -> None:
        """The head has been admitted."""
        if self._overdue() is sequence:
            self._last_aged = self._left
            self.num_aged += 1
            sequence.level = AGED_LEVEL
        self.remove(sequence)

    def fills(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether those that wait have so many tokens together, or are so many."""
        if len(self._entries) >= num_sequences:
            return True
        for entry in self._entries.values():
            num_tokens -= len(entry.item[3].tokens)
            if num_tokens <= 0:
                return True
        return False

    def restart(self, tree: PrefixTree) -> None:
        """The ranks died: the cache holds less than it did, or is another one."""
        self._now.tree = tree
        self.turn += 1

    def head(self) -> Sequence | None:
        """The next sequence; the same one until a sequence comes or goes, or a new turn begins."""
        if not self._entries:
            return None
        if self.admits_only:
            return next(
                (
                    entry.item[3]
                    for entry in self._entries.values()
                    if entry.item[3].request.id in self.admits_only
                ),
                None,
            )
        if (overdue := self._overdue()) is not None:
            return overdue
        if len(self._lanes) == 1:
            (lane,) = self._lanes.values()
        else:
            lane = self._lanes[min(self._lanes, key=lambda key: (key[0], self._shares.clock(key[1]), key[1]))]
        return lane.head(self.turn, self._now)

    def _overdue(self) -> Sequence | None:
        """The oldest sequence, if it was overtaken too often: all that have left since it is the oldest came
        later. Sequences that run in idle time only do not age."""
        if not self.order.patience or self._left - self._last_aged < AGED_EVERY:
            return None
        oldest = next((entry for entry in self._entries.values() if entry.lane[0] != IDLE_LEVEL), None)
        return (
            oldest.item[3]
            if oldest is not None and self._left - oldest.ordinal >= self.order.patience
            else None
        )
