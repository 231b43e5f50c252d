"""A backend whose library knows no calls (Calls in messages/constraint.py), with llguidance for those."""

from typing import cast

from runtime.grammar.backend import Backend, Compiled, GrammarVocabulary
from runtime.grammar.llguidance import create_backend
from runtime.messages.constraint import Grammar


class WithCalls:
    """See Backend. `main` compiles everything else."""

    def __init__(self, main: Backend, terms: GrammarVocabulary) -> None:
        self.byte_ids = main.byte_ids
        self._main = main
        self._calls = cast(Backend, create_backend(terms))

    def compile(self, grammar: Grammar) -> Compiled:
        """See Backend.compile."""
        if grammar.kind != "calls":
            return self._main.compile(grammar)
        return self._calls.compile(grammar)
