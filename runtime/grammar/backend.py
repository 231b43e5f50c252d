"""The protocols of a grammar backend: it compiles grammars over one vocabulary, and its matchers say which
tokens may come next."""

import re
from collections.abc import Callable
from typing import Protocol, Self

import numpy as np
from msgspec import Struct

from runtime.messages.constraint import Grammar

# most blanks between two tokens of JSON: room for indentation, and an end for models that write blanks
# forever
MAX_BLANKS = 16

# by name on the command line: module, package
BACKENDS = {
    "xgrammar": ("runtime.grammar.xgrammar", "xgrammar"),
    "llguidance": ("runtime.grammar.llguidance", "llguidance"),
    "outlines": ("runtime.grammar.outlines", "outlines_core"),
}


_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class GrammarError(Exception):
    """The grammar is invalid, or this backend does not support it. The message is for the client."""


class GrammarVocabulary(Struct, frozen=True, kw_only=True):
    """A vocabulary in the form that backends take: the bytes of each token, b"" for tokens that are not
    text."""

    tokens: list[bytes]
    encode: Callable[[str], list[int]]
    eos_ids: tuple[int, ...]
    whitespace_pattern: str | None = None
    is_compact: bool = False
    special: dict[str, int] = {}  # special tokens by their texts, which `tokens` does not have
    is_trial: bool = False  # grammars are tried, and followed by another process


class Matcher(Protocol):
    """The state of one sequence in a grammar."""

    def accept(self, token: int) -> bool:
        """Advances the state by `token`, which is not an eos id. False: the grammar does not allow it, or the
        backend gave up."""
        ...

    def fill(self, bits: np.ndarray) -> bool:
        """Sets bit i of int32 `bits` exactly where token i may come next; eos ids where the text may end.
        False: the backend gave up."""
        ...

    def fork(self) -> Self:
        """A copy of the matcher; neither advances the other."""
        ...

    def jump_forward(self) -> list[int]:
        """Tokens of a text that every continuation begins with, as the tokenizer writes it; `accept` takes
        each of them. It may be less than all that is determined."""
        ...


class Compiled(Protocol):
    """A grammar compiled over the backend's vocabulary."""

    num_bytes: int  # of memory, about

    def matcher(self) -> Matcher:
        """A fresh matcher, at the beginning of the grammar."""
        ...


class Backend(Protocol):
    """A library that turns grammars into masks. `byte_ids`: a token for each byte that is a token; where a
    mask allows two of them, nothing is determined."""

    byte_ids: tuple[int, ...]

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError."""
        ...


def find_byte_ids(terms: GrammarVocabulary) -> tuple[int, ...]:
    """See `Backend.byte_ids`."""
    return tuple({token: id for id, token in enumerate(terms.tokens) if len(token) == 1}.values())


def first_line(error: Exception) -> str:
    """A library's message without the time and the location in its own source that some libraries put before
    it."""
    return _PLACE.sub("", str(error).strip().split("\n", 1)[0])
