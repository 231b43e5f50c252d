"""The protocols of a grammar backend: it compiles grammars over one vocabulary, and its matchers say which
tokens may come next."""

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from msgspec import Struct

from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.text.vocabulary import Vocabulary

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


def open_backend(setup: GrammarSetup) -> Backend:
    """Reads the tokenizer and imports the library, which takes seconds."""
    vocabulary = Vocabulary.load(Path(setup.tokenizer_path), setup.vocab_size)
    terms = GrammarVocabulary(
        tokens=token_bytes(vocabulary, setup),
        encode=partial(vocabulary.encode, add_special=False),
        eos_ids=setup.eos_ids,
        whitespace_pattern=setup.whitespace_pattern,
        is_compact=setup.is_compact,
        special=special_tokens(vocabulary, setup),
    )
    backend: Backend = import_module(BACKENDS[setup.backend][0]).create_backend(terms)
    if setup.backend == "llguidance":
        return backend
    with_calls: Backend = import_module("runtime.grammar.with_calls").WithCalls(backend, terms)
    return with_calls


def token_bytes(vocabulary: Vocabulary, setup: GrammarSetup) -> list[bytes]:
    """Bytes of each token. Special tokens and eos ids are not text: a grammar never matches the letters in
    their names.

    Rows of the embedding beyond the vocabulary decode to nothing, and ids beyond the embedding cannot be
    sampled.
    """
    silent = vocabulary.special_ids | set(setup.eos_ids)
    return [b"" if i in silent else vocabulary.token_bytes(i) for i in range(setup.vocab_size)]


def special_tokens(vocabulary: Vocabulary, setup: GrammarSetup) -> dict[str, int]:
    """Ids of the special tokens that may stand in an answer, by their texts."""
    ids = vocabulary.special_ids - set(setup.eos_ids)
    return {
        vocabulary.token_bytes(i).decode(errors="replace"): i for i in sorted(ids) if i < setup.vocab_size
    }


def find_byte_ids(terms: GrammarVocabulary) -> tuple[int, ...]:
    """See `Backend.byte_ids`."""
    return tuple({token: id for id, token in enumerate(terms.tokens) if len(token) == 1}.values())


def first_line(error: Exception) -> str:
    """A library's message without the time and the location in its own source that some libraries put before
    it."""
    return _PLACE.sub("", str(error).strip().split("\n", 1)[0])
