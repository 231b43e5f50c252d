"""Which drafts the next step verifies."""

from runtime.cache.media_keys import FIRST_KEY
from runtime.cache.sequence import Sequence
from runtime.scheduling.drafts import MAX_VERIFIED, Draft, Drafter, forced_draft, landed
from runtime.scheduling.roster import Roster
from runtime.scheduling.speculation.predicted import PredictedDrafter
from runtime.scheduling.step_builder import StepBuilder


def num_of_text(draft: Draft) -> int:
    """How many drafts come before the first media key: what followed in a prompt may be an image."""
    if draft.is_own or max(draft.tokens, default=0) < FIRST_KEY:
        return len(draft.tokens)
    return next((i for i, token in enumerate(draft.tokens) if token >= FIRST_KEY), len(draft.tokens))


class DraftPlanner:
    """Chooses drafts for decoding sequences: what a grammar forces, else what the client predicts, else what
    the drafter proposes."""

    def __init__(self, roster: Roster, drafter: Drafter | None, max_step_tokens: int) -> None:
        """`drafter`: None where only grammars have drafts."""
        self.roster = roster
        self.drafter = drafter
        self.predicted = PredictedDrafter(roster.max_running)
        self.max_step_tokens = max_step_tokens
        self._rests = 0  # steps for which the drafter is left alone
        self._num_rested, self._rested_s = 0, 0.0  # steps that it was told nothing of, and what they took
        self._nodes = 0  # tokens in rows of drafts for which recurrent layers have memory in the next step
        # sequences with forced tokens or drafts in flight, by id; others decode one token a row
        self.pending: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """The sequence was added to the scheduler."""
        self._rests = 0
        if sequence.request.prediction:
            self.predicted.add(sequence)

    def force(self, sequence: Sequence, tokens: list[int]) -> None:
        """A grammar forces `tokens` after those that `sequence` has."""
        sequence.forced, sequence.forced_at = tokens, len(sequence.tokens)
        self.pending[sequence.id] = sequence

    def begin(self) -> bool:
        """A step is planned. -> whether a sequence may have drafts, in this step or in flight"""
        rows = len(self.roster.decoding)
        asks = bool(self.pending)
        if self._rests:
            self._rests -= 1
        elif self.drafter is not None:
            if self._num_rested:
                self.drafter.passed(rows, self._num_rested, self._rested_s)
                self._num_rested, self._rested_s = 0, 0.0
            rests = self.drafter.begin(rows)
            if not rests and rows == 1:
                only = self.roster.decoding[0]
                rests = only.draft_from - only.computed_len - only.drafting
            if rests > 0:
                self._rests = rests - 1
            else:
                asks = True
        if self.predicted:
            self.predicted.begin(rows)
            asks = True
        return asks

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A step without prompts, of so many rows and drafts, took `seconds`."""
        if self._rests and not drafts:
            self._num_rested += 1
            self._rested_s += seconds
        elif self.drafter is not None:
            self.drafter.learn(rows, drafts, seconds)
        if self.predicted:
            self.predicted.learn(rows, drafts, seconds)

    def passed(self, seconds: float) -> None:
        """A step with prompts took `seconds`."""
        self._num_rested += 1
        self._rested_s += seconds

    def budget(self) -> int:
        """Draft tokens of the next step, which is about to be planned; known tokens of prompts get at least
        half of it."""
        states = self.roster.cache.states
        self._nodes = 0 if states is None else states.draft_nodes
        size = self.max_step_tokens
        return size // 2 if self.roster.extending or self.roster.waiting.has_ready else size

    def draft(self, sequence: Sequence, last: int, budget: int) -> Draft | None:
        """What a row verifies after its first token, which stands at `last` or before: at most `budget`
        tokens.

        Takes pages for them where there are some, from no other sequence.
        """
        cache, params = self.roster.cache, sequence.request.params
        most = min(budget, sequence.max_len - last - 2)
        if most <= 0 or params.reports_tokens:
            return None
        draft = None
        if sequence.forced and not sequence.drafting:
            draft = forced_draft(sequence, last)
        allowed = min(most, MAX_VERIFIED, params.max_drafts)
        if draft is None and sequence.request.prediction and allowed:
            draft = self.predicted.propose(sequence, last, allowed)
        if draft is None and self.drafter is not None and allowed:
            draft = self.drafter.propose(sequence, sequence.computed_len, last, allowed)
        if draft is None:
            return None
        most = min(most, len(draft.tokens) if draft.is_sure else MAX_VERIFIED)
        if cache.states is not None and not draft.is_sure:
            if draft.is_tree:
                return None  # recurrent layers go from one token to the next
            most = min(most, self._nodes - 1)
        room = len(sequence.pages) * cache.page_size - last - 1
        # the windows' pages are promised to prompts that are under way
        may_grow = cache.window is None or not self.roster.extending
        while room < len(draft.tokens) and room < most and may_grow and cache.grow(sequence):
            room += cache.page_size
        draft = draft.first(min(most, room, num_of_text(draft)))
        if cache.states is not None and draft is not None and not draft.is_sure:
            self._nodes -= 1 + len(draft.tokens)
            cache.states.drafted(sequence, len(draft.tokens))
        return draft

    def follows(self, builder: StepBuilder) -> bool:
        """Whether the draft model of the ranks follows the step of these rows. Where it does not, their
        tokens are unknown to it."""
        if self.drafter is None or not self.drafter.is_own:
            return False
        if not self.drafter.follows:
            for sequence, count in builder.computed():
                sequence.unfollowed += count
        return self.drafter.follows

    def landed(self, sequence: Sequence, draft: Draft, num_tokens: int) -> None:
        """A verify row of these drafts has brought so many tokens, the one sampled last among them."""
        landed(sequence, draft, num_tokens)
        if self.drafter is not None and draft.is_own and not sequence.is_finished:
            self.drafter.landed(sequence, len(draft.tokens), num_tokens - 1)

    def ended(self, sequence: Sequence) -> None:
        """No tokens of the sequence are taken in any more."""
        self.predicted.ended(sequence)
        if self.drafter is not None:
            self.drafter.ended(sequence)

    def planned(self, sequences: list[Sequence]) -> None:
        """The next step verifies drafts of these."""
        if not sequences and not self.pending:
            return
        drafting = self.pending | {s.id: s for s in sequences}
        self.pending = {s.id: s for s in drafting.values() if (s.drafting or s.forced) and not s.is_finished}
