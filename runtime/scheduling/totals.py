"""Counts of what was planned, and of what became of it."""

from collections.abc import Iterable

from msgspec import Struct


class Totals(Struct):
    """What the scheduler has done since the start."""

    steps: int = 0
    prompt_steps: int = 0  # of them, with known tokens in them
    verify_steps: int = 0  # of the others, with drafts in them
    known_tokens: int = 0  # in those, of prompts above all
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0  # of them, from host memory
    saved_pages: int = 0  # to host memory
    preemptions: int = 0
    priority_preemptions: int = 0  # preemptions for a sequence of better priority
    held_back: int = 0  # steps in which long prompts left room for others
    verified_rows: int = 0  # rows whose drafts were verified; those of ended sequences are left out
    drafted_tokens: int = 0  # their drafts
    accepted_drafts: int = 0

    def add_verified(self, rows: Iterable[tuple[int, int]]) -> None:
        """Rows were verified, of so many drafts and accepted ones each."""
        for drafted, accepted in rows:
            self.verified_rows += 1
            self.drafted_tokens += drafted
            self.accepted_drafts += accepted
