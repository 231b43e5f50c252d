"""Which drafts the next step verifies."""

from collections.abc import Iterable

from runtime.cache.sequence import Sequence
from runtime.scheduling.drafts import MAX_VERIFIED, Draft, Drafter, forced_draft
from runtime.scheduling.roster import Roster


class DraftPlanner:
    """Chooses drafts for decoding sequences: what a grammar forces, else what the drafter proposes."""

    def __init__(self, roster: Roster, drafter: Drafter | None, max_step_tokens: int) -> None:
        """`drafter`: None where only grammars have drafts."""
        self.roster = roster
        self.drafter = drafter
        self.max_step_tokens = max_step_tokens
        # sequences with forced tokens or drafts in flight, by id; others decode one token a row
        self._drafting: dict[int, Sequence] = {}

    @property
    def is_active(self) -> bool:
        """Whether a sequence may have drafts, in the next step or in flight."""
        return self.drafter is not None or bool(self._drafting)

    def force(self, sequence: Sequence, tokens: list[int]) -> None:
        """A grammar forces `tokens` after those that `sequence` has."""
        sequence.forced, sequence.forced_at = tokens, len(sequence.tokens)
        self._drafting[sequence.id] = sequence

    def budget(self) -> int:
        """Draft tokens of the next step; known tokens of prompts get at least half of it."""
        size = self.max_step_tokens
        return size // 2 if self.roster.extending or self.roster.waiting.has_ready else size

    def draft(self, sequence: Sequence, last: int, budget: int) -> Draft | None:
        """What a row verifies after its first token, which stands at `last` or before: at most `budget`
        tokens.

        Takes pages for them where there are some, from no other sequence.
        """
        cache = self.roster.cache
        most = min(budget, sequence.max_len - last - 2)
        if most <= 0 or sequence.request.params.hidden_states is not None:
            return None
        draft = None
        if sequence.forced and not sequence.drafting:
            draft = forced_draft(sequence, last)
        if draft is None and self.drafter is not None:
            draft = self.drafter.propose(sequence, sequence.computed_len, last, min(most, MAX_VERIFIED))
        if draft is None or not (draft.is_sure or cache.states is None):
            return None  # a recurrent state cannot take a token back
        most = min(most, len(draft.tokens) if draft.is_sure else MAX_VERIFIED)
        wanted = last + 1 + min(most, len(draft.tokens))
        # the windows' pages are promised to prompts that are under way
        may_grow = cache.window is None or not self.roster.extending
        while len(sequence.pages) * cache.page_size < wanted and may_grow and cache.grow(sequence):
            pass
        return draft.first(min(most, len(sequence.pages) * cache.page_size - last - 1))

    def planned(self, sequences: Iterable[Sequence]) -> None:
        """The next step verifies drafts of these."""
        drafting = self._drafting | {s.id: s for s in sequences}
        self._drafting = {
            s.id: s for s in drafting.values() if (s.drafting or s.forced) and not s.is_finished
        }
