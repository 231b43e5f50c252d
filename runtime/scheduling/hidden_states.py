"""Hidden states on their way back: of a prompt they come chunk by chunk, of generated tokens one with each
step."""

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence


class Shown(Struct, frozen=True):
    """The `count` hidden states that one row of a step brings: of a part of the prompt, or the one that the
    row's token is sampled from."""

    sequence: Sequence
    count: int
    is_prompt: bool
    is_last: bool  # the row samples


class Part(Struct, frozen=True):
    """What is shown, and where a prompt's are collected."""

    shown: Shown
    collected: list[np.ndarray] | None


class HiddenCollector:
    """Puts the prompt's hidden states together, for sequences that asked for them."""

    def __init__(self) -> None:
        self._collected: dict[int, list[np.ndarray]] = {}  # by sequence id

    def expect(self, shown: Shown) -> Part:
        """A row is planned."""
        return Part(shown, self._collected.setdefault(shown.sequence.id, []) if shown.is_prompt else None)

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended, or starts over: what is still in flight for it counts no more."""
        self._collected.pop(sequence.id, None)

    def clear(self) -> None:
        """The ranks died: prompts that are not complete are computed again, from their first token."""
        self._collected.clear()

    def take(self, numbers: np.ndarray, expected: list[Part]) -> dict[int, np.ndarray]:
        """A step's hidden states. -> what its tokens bring, by sequence id; copies, as the step's own hold
        those of others too"""
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
