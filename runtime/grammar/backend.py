"""What a backend is: it compiles grammars over one vocabulary, and their matchers say which tokens may come
next."""

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.text.vocabulary import Vocabulary

# of JSON, between two tokens of it: room for indentation, and an end to models that would write blanks for
# ever
MAX_BLANKS = 16

# by name on the command line: module, package
BACKENDS = {
    "xgrammar": ("runtime.grammar.xgrammar", "xgrammar"),
    "llguidance": ("runtime.grammar.llguidance", "llguidance"),
    "outlines": ("runtime.grammar.outlines", "outlines_core"),
}


_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class GrammarError(Exception):
    """The grammar is wrong, or this backend cannot keep it. The message is for the client."""


class Terms(Struct, frozen=True, kw_only=True):
    """A vocabulary as backends want it: the bytes of each token, none for those that are no text."""

    tokens: list[bytes]
    encode: Callable[[str], list[int]]
    eos_ids: tuple[int, ...]
    whitespace_pattern: str | None = None
    is_compact: bool = False
    special: dict[str, int] = {}  # special tokens by their texts, which `tokens` does not have


class Matcher(Protocol):
    """How far one sequence is in a grammar."""

    def accept(self, token: int) -> bool:
        """The sequence goes on with `token`, which is no eos id. False: the grammar does not allow it, or the
        backend gave up."""
        ...

    def fill(self, bits: np.ndarray) -> bool:
        """Sets bit i of int32 `bits` exactly where token i may come next; eos ids where the text may end.
        False: the backend gave up."""
        ...

    def fork(self) -> "Matcher":
        """A matcher that is where this one is; neither moves the other."""
        ...

    def forced(self) -> list[int]:
        """Tokens of a text with which every text goes on from here, as the tokenizer writes it; `accept`
        takes each of them. It need not be all that is forced."""
        ...


class Compiled(Protocol):
    """A grammar over the backend's vocabulary."""

    def matcher(self) -> Matcher: ...


class Backend(Protocol):
    """A library that turns grammars into masks."""

    byte_ids: tuple[int, ...]
    """A token for each byte that is one: a mask with two of them is of a place where nothing is forced."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError."""
        ...

    def fill(self, matchers: list[Any], bits: np.ndarray) -> list[int]:
        """`Matcher.fill` for each of this backend's matchers, in its row of `bits`. -> places of those that
        gave up"""
        ...


def fill_each(matchers: list[Matcher], bits: np.ndarray) -> list[int]:
    """`Backend.fill` where the library has nothing faster."""
    return [
        index
        for index, (matcher, row) in enumerate(zip(matchers, bits, strict=True))
        if not matcher.fill(row)
    ]


def open_backend(setup: GrammarSetup) -> Backend:
    """Reads the tokenizer and imports the library: seconds."""
    vocabulary = Vocabulary.load(Path(setup.tokenizer_path), setup.vocab_size)
    terms = Terms(
        tokens=token_bytes(vocabulary, setup),
        encode=partial(vocabulary.encode, add_special=False),
        eos_ids=setup.eos_ids,
        whitespace_pattern=setup.whitespace_pattern,
        is_compact=setup.is_compact,
        special=special_tokens(vocabulary, setup),
    )
    backend: Backend = import_module(BACKENDS[setup.backend][0]).open_terms(terms)
    return backend


def token_bytes(vocabulary: Vocabulary, setup: GrammarSetup) -> list[bytes]:
    """Special tokens and eos ids are no text: a grammar never asks for the letters in their names.

    Rows of the embedding beyond the vocabulary decode to nothing, and ids beyond the embedding can't be
    sampled.
    """
    silent = vocabulary.special_ids | set(setup.eos_ids)
    return [b"" if i in silent else vocabulary.token_bytes(i) for i in range(setup.vocab_size)]


def special_tokens(vocabulary: Vocabulary, setup: GrammarSetup) -> dict[str, int]:
    """Those that may stand in an answer, by their texts."""
    ids = vocabulary.special_ids - set(setup.eos_ids)
    return {
        vocabulary.token_bytes(i).decode(errors="replace"): i for i in sorted(ids) if i < setup.vocab_size
    }


def find_byte_ids(terms: Terms) -> tuple[int, ...]:
    """`Backend.byte_ids`."""
    return tuple({token: id for id, token in enumerate(terms.tokens) if len(token) == 1}.values())


def first_line(error: Exception) -> str:
    """What a library says, without the time and the place in its own source that some put before it."""
    return _PLACE.sub("", str(error).strip().split("\n", 1)[0])
