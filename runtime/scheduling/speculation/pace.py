"""How many drafts pay: what they are expected to bring, against what they make a step take."""

from runtime.scheduling.step_costs import MIN_STEPS, LeastSquares

SURE = 0.98  # no guess is taken to be right more often
MOST_TRIALS = 200.0  # that a class of guesses remembers
RECENT = 0.9  # weight of older guesses of one sequence, at each new one
WEIGHTS = tuple(RECENT**count for count in range(16))  # of older guesses behind so many new ones
FIRST_FIT = (1.0, 0.05, 0.0, 0.0)
GUESSED = 0.05  # of a step without rows: what a draft costs more than a row
FIRST_WEIGHT = 16  # steps with drafts after which what was learnt counts as much as what is guessed
KNOWN_STEPS = 64  # after which not every step without drafts is learnt, but one of SOME
SOME, FEW = 8, 256  # and where there were no drafts for QUIET_STEPS, one of FEW
QUIET_STEPS = 256
LEARNT_AFTER_S = 6e-3  # of steps: learning from one takes 30 µs, and so not more than half a per cent of them
OUTLIER = 1.5  # times longer than expected: what a step counts for at most
PROBE = 32  # times that drafts with a good chance did not pay, after which they are made once all the same
GOOD_CHANCE = 0.8
PROBED = 4  # drafts
OWN_WEIGHT = 4.0  # guesses of its class that a sequence starts with
# chance of a guess after a match of 1, 2 to 3, 4 to 7, 8 to 15 tokens, and of more, before any was seen
FIRST_CHANCES = (0.3, 0.5, 0.7, 0.8, 0.9)
CLASSES = (0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3)  # of a match, by its length; longer ones: the last


# What looking drafts up may take where it leads to none: a share of the time that steps take, and so much at
# once. A step takes what its ranks report, and no less than the event loop needs for it and its rows.
LOOKING = 0.01
MOST_LOOKING_S = 1e-3
LOOP_STEP_S, LOOP_ROW_S = 50e-6, 8e-6
MOST_RESTS = 64  # steps
WAITED_S = 0.2e-3  # once it is used up, so much is waited for: looks at many sequences cost less than at few


class Record:
    """How often guesses of one sequence were right lately."""

    __slots__ = ("right", "trials")

    def __init__(self) -> None:
        self.right = self.trials = 0.0

    def add(self, num_right: int, is_wrong: bool) -> None:
        """So many more guesses that were right, and then perhaps a wrong one."""
        if num_right:
            weight = WEIGHTS[num_right] if num_right < len(WEIGHTS) else RECENT**num_right
            gained = (1.0 - weight) / (1.0 - RECENT)
            self.right = self.right * weight + gained
            self.trials = self.trials * weight + gained
        if is_wrong:
            self.right *= RECENT
            self.trials = self.trials * RECENT + 1.0

    def add_trials(self, num_right: int, trials: float) -> None:
        """So many more guesses that were right, in so many trials."""
        weight = RECENT**trials
        self.right = self.right * weight + num_right
        self.trials = self.trials * weight + trials


class Chances:
    """How often guesses were right, by the length of what they matched."""

    def __init__(self) -> None:
        self._right = [4.0 * chance for chance in FIRST_CHANCES]
        self._trials = [4.0] * len(FIRST_CHANCES)

    def add(self, matched: int, num_right: int, num_wrong: float) -> None:
        """Guesses after a match of `matched` tokens."""
        kind = self._kind(matched)
        self._right[kind] += num_right
        self._trials[kind] += num_right + num_wrong
        if self._trials[kind] > MOST_TRIALS:
            self._right[kind] *= MOST_TRIALS / self._trials[kind]
            self._trials[kind] = MOST_TRIALS

    def of(self, matched: int, record: Record) -> float:
        """The chance of the next guess of a sequence with this record, and of each after it."""
        chance = (record.right + OWN_WEIGHT * self.usual(matched)) / (record.trials + OWN_WEIGHT)
        return chance if chance < SURE else SURE

    def add_tree(self, matched: int, num_right: int, trials: float, record: Record) -> None:
        """A tree of guesses brought `num_right` tokens, to which a chance of each brings them in `trials`
        trials on average. Adds them to the sequence's record as well."""
        record.add_trials(num_right, trials)
        self.add(matched, num_right, trials - num_right)

    def usual(self, matched: int) -> float:
        """The chance of a guess after a match of `matched` tokens, of any sequence."""
        kind = self._kind(matched)
        return self._right[kind] / self._trials[kind]

    def _kind(self, matched: int) -> int:
        return CLASSES[matched] if matched < len(CLASSES) else len(FIRST_CHANCES) - 1


class Pace:
    """The cost of a draft, learnt from the times of steps without prompts:

        seconds = a + b rows + c (if there are drafts) + d drafts

    A draft pays where its chance is above d times the tokens per second that the step brings without it.
    """

    def __init__(self) -> None:
        self._costs = LeastSquares((1.0, 16.0, 1.0, 64.0), (1e-9, 1e-9, 1e-6, 1e-6))
        self._seen = 0  # steps
        self._quiet = 0  # of these since the last one with drafts
        self._learnt_at = 0  # the one that was learnt last
        self._unlearnt_s = 0.0  # that steps have taken since
        self._with_drafts = 0  # steps learnt that had some
        self._usual = 1.0  # drafts of a step that has some
        self._fit = (0.0, 0.0, 0.0, 0.0)
        self._declined = 0  # drafts with a good chance that did not pay
        self._rows = 1  # of the step that is planned
        self._is_ready = False  # what the step takes is computed when it is first asked for
        self._tokens = self._seconds = self._draft_s = 0.0
        self._looking_s = MOST_LOOKING_S  # that looks may still take
        self.has_time = True  # for a look

    def passed(self, rows: int, steps: int, seconds: float) -> None:
        """Steps of so many rows each took so long."""
        self._seen += steps
        self._quiet += steps
        least = steps * (LOOP_STEP_S + rows * LOOP_ROW_S)
        seconds = seconds if seconds > least else least
        self._unlearnt_s += seconds
        left = self._looking_s + LOOKING * seconds
        self._looking_s = left if left < MOST_LOOKING_S else MOST_LOOKING_S
        if left > WAITED_S:
            self.has_time = True

    def rests(self) -> int:
        """Steps until there is time for looks again, where steps take what the event loop needs for them."""
        step_s = LOOP_STEP_S + self._rows * LOOP_ROW_S
        steps = int((WAITED_S - self._looking_s) / (LOOKING * step_s)) + 1
        return min(MOST_RESTS, max(1, steps))

    def spend(self, seconds: float) -> None:
        """A look took so long, and led to no drafts."""
        self._looking_s -= seconds
        if self._looking_s <= 0.0:
            self.has_time = False

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A step of so many rows, verified drafts among their tokens, took `seconds`."""
        self.passed(rows, 1, seconds)
        if drafts:
            self._quiet = 0
            if self._with_drafts >= KNOWN_STEPS and self._unlearnt_s < LEARNT_AFTER_S:
                return
        elif self._seen > KNOWN_STEPS:
            # there are many of these, and learning takes as long as planning some rows
            few = self._seen - self._learnt_at < (SOME if self._quiet < QUIET_STEPS else FEW)
            if few or self._unlearnt_s < LEARNT_AFTER_S:
                return
        self._learnt_at, self._unlearnt_s = self._seen, 0.0
        features = (1.0, float(rows), float(drafts > 0), float(drafts))
        if self._costs.num_learnt > MIN_STEPS:  # a step that waited for a core says nothing of its rows
            expected = sum([cost * feature for cost, feature in zip(self._fit, features, strict=True)])
            seconds = min(seconds, OUTLIER * expected)
        self._costs.learn(features, seconds)
        if drafts:
            self._with_drafts += 1
            self._usual += (drafts - self._usual) / 8
        if self._costs.num_learnt % 4 == 0:
            a, b, c, d = self._costs.coefficients.tolist()
            self._fit = (a, b, c, d)

    def begin(self, rows: int) -> None:
        """The next step has so many rows that may have drafts."""
        self._rows, self._is_ready = rows, False

    def _expect(self) -> None:
        """What the next step takes without drafts, and each of these more."""
        rows, self._is_ready = self._rows, True
        a, b, c, d = self._fit if self._fit[0] + self._fit[1] > 0.0 else FIRST_FIT
        self._tokens, self._seconds = float(rows), a + b * rows
        # little is known of drafts at first: they cost somewhat more than rows
        known = self._with_drafts / (self._with_drafts + FIRST_WEIGHT)
        self._draft_s = known * (d + c / max(self._usual, 1.0)) + (1.0 - known) * (b + GUESSED * a)

    def pays(self, chance: float) -> bool:
        """Whether the first draft of a row pays in the next step, if it is right with `chance`."""
        if not self._is_ready:
            self._expect()
        return chance * self._seconds > self._draft_s * self._tokens

    def worth(self, gains: tuple[float, ...]) -> int:
        """How many drafts of a row pay, where each further one adds these tokens to what the step brings,
        falling."""
        if not self._is_ready:
            self._expect()
        seconds, tokens, cost = self._seconds, self._tokens, self._draft_s
        for count, gain in enumerate(gains):
            if gain * seconds <= cost * tokens:
                return count
            tokens += gain
            seconds += cost
        return len(gains)

    def count(self, chance: float, skipped: int, most: int) -> int:
        """How many drafts of a row pay, at most `most`, where each is right with `chance` if all before it
        are, `skipped` guesses that are in flight among these."""
        if most <= 0:
            return 0
        if not self._is_ready:
            self._expect()
        seconds, tokens, cost = self._seconds, self._tokens, self._draft_s
        reached = chance ** (skipped + 1)
        count = 0
        while count < most and reached * seconds > cost * tokens:
            tokens += reached
            seconds += cost
            reached *= chance
            count += 1
        if not count and chance >= GOOD_CHANCE and skipped <= 1:
            self._declined += 1
            if self._declined % PROBE == 0:
                return min(most, PROBED)
        return count
