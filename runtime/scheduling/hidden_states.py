"""Hidden states and routed experts on their way back: of a prompt they come chunk by chunk, of generated
tokens one with each step."""

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence


class Shown(Struct, frozen=True):
    """The `count` tokens of one row of a step that are reported: a part of the prompt, or the one that the
    row's token is sampled from."""

    sequence: Sequence
    count: int
    is_prompt: bool
    is_last: bool  # the row samples


class ShownTokens:
    """The tokens of a step that are reported, in row order."""

    def __init__(self) -> None:
        self.rows: list[Shown] = []
        self._places: list[np.ndarray] = []

    def add(self, shown: Shown, end: int) -> None:
        """The last tokens of a row that ends before place `end` of the step."""
        self.rows.append(shown)
        self._places.append(np.arange(end - shown.count, end, dtype=np.int32))

    def places(self) -> np.ndarray | None:
        """int32: their places in the order of the rows; None: there are none."""
        return np.concatenate(self._places) if self._places else None


class Part(Struct, frozen=True):
    """What is shown, and where a prompt's are collected."""

    shown: Shown
    collected: list[np.ndarray] | None


class TokenReports:
    """Puts together what is reported of each token of a prompt, for sequences that asked for it."""

    def __init__(self) -> None:
        self._collected: dict[int, list[np.ndarray]] = {}  # by sequence id

    def expect(self, rows: list[Shown]) -> list[Part]:
        """Rows are planned."""
        return [
            Part(row, self._collected.setdefault(row.sequence.id, []) if row.is_prompt else None)
            for row in rows
        ]

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended, or starts over: what is still in flight for it counts no more."""
        self._collected.pop(sequence.id, None)

    def clear(self) -> None:
        """The ranks died: prompts that are not complete are computed again, from their first token."""
        self._collected.clear()

    def take(self, numbers: np.ndarray, expected: list[Part]) -> dict[int, np.ndarray]:
        """What a step reports of `expected`, as many numbers of each token. -> by sequence id, [tokens,
        numbers]; copies, as the step's own hold those of others too"""
        rows = numbers.reshape(sum(part.shown.count for part in expected), -1)
        found: dict[int, np.ndarray] = {}
        at = 0
        for part in expected:
            shown, collected = part.shown, part.collected
            states = rows[at : at + shown.count].copy()
            at += shown.count
            if collected is None:
                found[shown.sequence.id] = states
                continue
            collected.append(states)
            if shown.is_last and self._collected.get(shown.sequence.id) is collected:
                found[shown.sequence.id] = np.concatenate(self._collected.pop(shown.sequence.id))
        return found
