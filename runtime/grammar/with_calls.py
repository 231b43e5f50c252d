"""A backend whose library knows no calls (Calls in messages/constraint.py), with llguidance for those."""

from typing import cast

import numpy as np

from runtime.grammar.backend import Backend, Compiled, GrammarVocabulary
from runtime.grammar.llguidance import LLGuidanceMatcher, create_backend
from runtime.messages.constraint import Grammar


class WithCalls:
    """See Backend. `main` compiles everything else."""

    def __init__(self, main: Backend, terms: GrammarVocabulary) -> None:
        self.byte_ids = main.byte_ids
        self._main = main
        self._calls = cast(Backend, create_backend(terms))
        self._has_calls = False  # whether any were compiled

    def compile(self, grammar: Grammar) -> Compiled:
        """See Backend.compile."""
        if grammar.kind != "calls":
            return self._main.compile(grammar)
        self._has_calls = True
        return self._calls.compile(grammar)

    def fill(self, matchers: list[object], bits: np.ndarray) -> list[int]:
        """See Backend.fill."""
        if not self._has_calls:
            return self._main.fill(matchers, bits)
        rows = [row for row, matcher in enumerate(matchers) if isinstance(matcher, LLGuidanceMatcher)]
        others = [row for row in range(len(matchers)) if row not in rows]
        lost = self._fill_rows(self._calls, matchers, rows, bits) if rows else []
        return lost + (self._fill_rows(self._main, matchers, others, bits) if others else [])

    def _fill_rows(
        self, backend: Backend, matchers: list[object], rows: list[int], bits: np.ndarray
    ) -> list[int]:
        part = np.empty((len(rows), bits.shape[1]), bits.dtype)
        lost = backend.fill([matchers[row] for row in rows], part)
        bits[rows] = part
        return [rows[index] for index in lost]
