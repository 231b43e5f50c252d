"""Drafts: guesses of a sequence's next tokens, computed together with its last token in one verify row.

A drafter proposes them; what a grammar forces is drafted without one (jump-forward). While verify rows are in
flight the scheduler knows the sequence's length between bounds: `Sequence.computed_len` counts one token for
each of them, `Sequence.drafting` the tokens that their drafts may add. Pages are reserved for the sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache

from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.messages.steps import OWN_DRAFT, StepResult

MAX_VERIFIED = 255  # drafts of a row after which something is sampled: each takes a row of logits


class Draft(Struct, frozen=True):
    """Guesses of the tokens that follow a sequence's last token."""

    tokens: list[int]
    # of each guess: what it follows, 0 being the sequence's last token and i the i-th guess, which stands
    # before it; None: a chain, in which each follows the one before it
    parents: list[int] | None = None
    # they are right: all are accepted, and only the last token is sampled after
    is_sure: bool = False
    is_own: bool = False  # the ranks make them: each token is OWN_DRAFT

    @staticmethod
    def own(count: int) -> "Draft":
        """`count` guesses that the ranks make."""
        return _own_draft(count)

    @property
    def is_tree(self) -> bool:
        """Whether some guess does not follow the one before it."""
        return self.parents is not None and self.parents != list(range(len(self.tokens)))

    def first(self, count: int) -> "Draft | None":
        """The first `count` guesses; None where that is none."""
        if count >= len(self.tokens):
            return self
        if count <= 0:
            return None
        parents = None if self.parents is None else self.parents[:count]
        return Draft(self.tokens[:count], parents, self.is_sure, self.is_own)


@cache
def _own_draft(count: int) -> Draft:
    return Draft([OWN_DRAFT] * count, is_own=True)


class Drafter(ABC):
    """Proposes drafts. Wrong ones cost time and change no token."""

    is_own = False  # the ranks make the drafts
    branches = 1  # that these have at a position
    follows = False  # and their draft model follows the steps that are planned now

    @abstractmethod
    def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
        """At most `most` guesses of the tokens after one whose position is between `first` and `last`.

        `sequence.tokens` are known; those between their end and that position are being sampled. The bounds
        differ while other drafts of the sequence are in flight. None: nothing to propose.
        """

    def begin(self, rows: int) -> int:
        """A step is planned in which so many sequences may have drafts. -> for how many steps, this one among
        them, the drafter wants to be left alone: 0 to be asked for drafts now"""
        return 0

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A step without prompts, of so many rows and drafts, took `seconds`."""
        return

    def passed(self, rows: int, steps: int, seconds: float) -> None:
        """Steps of so many rows each, with prompts among them or while the drafter was left alone, took
        `seconds`."""
        return

    def landed(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A verify row of `sequence` had `num_drafts` drafts that the ranks made (Draft.is_own), and
        `num_accepted` of them were accepted."""
        return

    def ended(self, sequence: Sequence) -> None:
        """The sequence has ended, or another replica goes on with it: no tokens of it come any more."""
        return

    def forget(self) -> None:
        """Forgets the texts of sequences that have ended."""
        return


class Verified(Struct, frozen=True):
    """A verify row in flight: its place among the rows that sample, and its drafts."""

    row: int
    draft: Draft


def forced_draft(sequence: Sequence, first: int) -> Draft | None:
    """What a grammar forces after the token at position `first`, which is certain.

    Where each token's log probability is reported, or logits depend on the tokens before, all are sampled.
    """
    offset = first + 1 - sequence.forced_at
    if offset < 0 or offset >= len(sequence.forced):
        sequence.forced = []
        return None
    params = sequence.request.params
    is_sure = not (
        params.logprobs
        or params.has_penalties
        or params.processor is not None
        or sequence.request.has_bad_sequences
    )
    return Draft(sequence.forced[offset:], None, is_sure)


def planned(sequence: Sequence, draft: Draft) -> None:
    """A verify row of these drafts is planned."""
    count = len(draft.tokens)
    if draft.is_sure:
        sequence.computed_len += count + 1
        sequence.in_flight += count + 1
    else:
        sequence.computed_len += 1
        sequence.in_flight += 1
        sequence.drafting += count


def landed(sequence: Sequence, draft: Draft, num_accepted: int) -> None:
    """A verify row has brought `num_accepted` tokens, the one sampled last among them."""
    count = len(draft.tokens)
    if draft.is_sure:
        sequence.in_flight -= count + 1
        return
    sequence.in_flight -= 1
    sequence.drafting -= count
    if sequence.slot >= 0:  # else it gave way, and computes all of its tokens again
        sequence.computed_len += num_accepted - 1


def split_rows(result: StepResult, verified: Iterable[Verified]) -> list[list[int]]:
    """The tokens that each row has brought, in the order of the rows that sample."""
    tokens = result.token_ids.tolist()
    if result.num_tokens is None:
        rows = [[token] for token in tokens]
    else:
        rows, end = [], 0
        for count in result.num_tokens.tolist():
            rows.append(tokens[end : end + count])
            end += count
    for row in verified:
        if row.draft.is_sure:
            rows[row.row] = [*row.draft.tokens, *rows[row.row]]
    return rows


def take(sequence: Sequence, tokens: list[int]) -> list[int]:
    """Appends the tokens that come before the sequence's end, and returns them."""
    taken = tokens[: sequence.max_len - len(sequence.tokens)]
    if not sequence.stop_ids.isdisjoint(taken):
        taken = taken[: 1 + next(i for i, token in enumerate(taken) if token in sequence.stop_ids)]
    sequence.tokens.extend(taken)
    return taken
