"""Drafts that the ranks make with a draft model, at the beginning of the very step that verifies them."""

from runtime.cache.sequence import Sequence
from runtime.scheduling.drafts import Draft, Drafter
from runtime.scheduling.speculation.pace import Chances, Pace, Record
from runtime.scheduling.speculation.tree_gains import tree_gains, tree_trials

# of a sequence's tokens; a draft model that knows less of them guesses badly
MOST_UNFOLLOWED = 1 / 8
IDLE_STEPS = 256  # without a draft that pays, after which the draft model follows no more
AWAY_STEPS = 4096  # after which it follows again
PROBE_STEPS = 32  # between two drafts of a sequence whose drafts do not pay, to see whether they do again


class OwnDrafter(Drafter):
    """Says how many drafts the ranks make. It knows none of them, so steps are planned ahead as without."""

    is_own = True

    def __init__(
        self, max_drafts: int, *, branches: int = 1, depth: int = 1, pace: Pace | None = None
    ) -> None:
        """`max_drafts`: of a row. With several `branches` at a position they form a tree, at most `depth`
        behind one another."""
        self.max_drafts = max_drafts
        self.branches = branches
        self.depth = depth
        self.follows = True
        self.pace = pace or Pace()
        self.chances = Chances()
        self._records: dict[int, Record] = {}
        self._step = 0
        self._paid = 0  # the last step in which drafts were expected to pay
        self._left = (0, 0)  # the step in which the draft model was left behind, and its rows

    def begin(self, rows: int) -> int:
        """One more step. Where drafts have not paid for a while, the draft model follows no more until fewer
        sequences run, or a long time has passed. -> see Drafter"""
        self.pace.begin(rows)
        self._step += 1
        if self.follows and rows and self._step - self._paid > IDLE_STEPS:
            self.follows, self._left = False, (self._step, rows)
        elif not self.follows and (2 * rows < self._left[1] or self._step - self._left[0] > AWAY_STEPS):
            self.follows, self._paid = True, self._step
        return 0 if self.follows else 1

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A step of so many rows, verified drafts among their tokens, took `seconds`."""
        self.pace.learn(rows, drafts, seconds)

    def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
        """As many drafts as pay, made by the ranks; None for a sequence whose tokens the draft model has not
        computed."""
        most = min(most, self.max_drafts)
        if most <= 0 or not self.follows or sequence.unfollowed > first * MOST_UNFOLLOWED:
            return None
        chance = self.chances.of(1, self._record(sequence))
        if self.branches > 1:
            count = self.pace.worth(tree_gains(chance, self.branches, self.depth, most))
        else:
            count = self.pace.count(chance, 0, most)
        if count:
            self._paid = self._step
        elif self._step % PROBE_STEPS == sequence.id % PROBE_STEPS:
            count = min(most, self.branches)
        return Draft.own(count) if count else None

    def landed(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Drafts of the sequence were verified: the accepted ones were right, and one after them wrong."""
        record = self._record(sequence)
        if self.branches > 1:
            trials = tree_trials(self.chances.of(1, record), self.branches, self.depth, num_drafts)
            return self.chances.add_tree(1, num_accepted, trials, record)
        is_wrong = num_accepted < num_drafts
        record.add(num_accepted, is_wrong)
        self.chances.add(1, num_accepted, is_wrong)

    def ended(self, sequence: Sequence) -> None:
        """Forgets the sequence."""
        self._records.pop(sequence.id, None)

    def _record(self, sequence: Sequence) -> Record:
        if (record := self._records.get(sequence.id)) is None:
            record = self._records[sequence.id] = Record()
        return record
