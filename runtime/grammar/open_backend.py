"""Opens the backend of a grammar setup over the vocabulary of its tokenizer.

A library that does not know some grammars has another one beside it, which is opened when the first of them
comes.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from msgspec import Struct

from runtime.grammar.backend import BACKENDS, Backend, Compiled, GrammarVocabulary
from runtime.grammar.token_tree import TokenTrees
from runtime.messages.constraint import Grammar, GrammarSetup, Kind
from runtime.text.token_table import TokenTable
from runtime.text.vocabulary import Vocabulary, table_of


class Others(Struct, frozen=True):
    """The library beside the main one, and what it compiles: kinds of grammars, and schemas with any of these
    keywords."""

    backend: str
    kinds: frozenset[Kind]
    keywords: tuple[str, ...] = ()


_CALLS = Others("llguidance", frozenset({"calls"}))
# by main backend
OTHERS = {
    "xgrammar": _CALLS,
    "outlines": _CALLS,
    "llguidance": Others(
        "xgrammar",
        frozenset({"structural_tag"}),
        ("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    ),
}


class WithOthers:
    """See Backend. `main` compiles what `others` does not, whose library `open_other` opens; None: there is
    no other one. `encode`: of forced texts, which all matchers use; None: no tokenizer is read for them.
    `vocab_size`: of the model."""

    def __init__(
        self,
        main: Backend,
        others: Others | None = None,
        open_other: Callable[[], Backend] | None = None,
        encode: "Encoder | None" = None,
        vocab_size: int = 0,
    ) -> None:
        self.byte_ids = main.byte_ids
        self.encode = encode
        self._main = main
        self._others = others
        self._open_other = open_other
        self._other: Backend | None = None
        self._trees = TokenTrees(vocab_size)

    def load(self, grammar: Grammar) -> Backend:
        """What compiles a grammar; opened here, if it was not: before a fork, so that children have it."""
        if grammar.kind == "token_tree":
            return self._trees
        if self._open_other is None or self._others is None or not _is_of(self._others, grammar):
            return self._main
        self._other = self._other or self._open_other()
        return self._other

    def compile(self, grammar: Grammar) -> Compiled:
        """See Backend.compile."""
        return self.load(grammar).compile(grammar)


def _is_of(others: Others, grammar: Grammar) -> bool:
    """Whether the other library compiles the grammar. A schema in which a keyword's name is something else
    is compiled by it as well, which does no harm."""
    if grammar.kind == "json_schema":
        return any([f'"{keyword}"' in grammar.text for keyword in others.keywords])
    return grammar.kind in others.kinds


class Encoder:
    """Encodes forced texts. Masks need no tokenizer, so it is read when `load` is called or the first text
    comes, in a thread of its own: the time of a matcher is measured and bounded."""

    def __init__(self, folder: Path, size: int, vocabulary: Vocabulary | None = None) -> None:
        self._read = partial(Vocabulary.load, folder, size)
        self._lock = Lock()
        self._vocabulary: Future[Vocabulary] | None = None
        if vocabulary is not None:
            self._vocabulary = Future()
            self._vocabulary.set_result(vocabulary)

    def load(self) -> Future[Vocabulary]:
        """Begins to read the tokenizer, if that was not done before."""
        with self._lock:
            if self._vocabulary is None:
                reader = ThreadPoolExecutor(1, "tokenizer")
                self._vocabulary = reader.submit(self._read)
                reader.shutdown(wait=False)
            return self._vocabulary

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text. Raises InvalidRequest for half a surrogate pair."""
        return self.load().result().encode(text, add_special=False)


def open_backend(setup: GrammarSetup, *, is_trial: bool = False) -> WithOthers:
    """Reads the vocabulary and imports the library: some tenths of a second, and with xgrammar seconds.

    The tokenizer is read later where the texts of its tokens are kept in a file; and not at all where
    `is_trial`: what is compiled is only tried then, so forced texts are spelled in single bytes.
    """
    folder = Path(setup.tokenizer_path)
    vocabulary = None
    if (table := table_of(folder, setup.vocab_size)) is None:
        vocabulary = Vocabulary.load(folder, setup.vocab_size)
        table = vocabulary.token_table
    tokens = token_bytes(table, setup)
    encoder = None if is_trial else Encoder(folder, setup.vocab_size, vocabulary)
    terms = GrammarVocabulary(
        tokens=tokens,
        encode=encoder or partial(spell, {text: i for i, text in enumerate(tokens) if len(text) == 1}),
        eos_ids=setup.eos_ids,
        whitespace_pattern=setup.whitespace_pattern,
        is_compact=setup.is_compact,
        special=special_tokens(table, setup),
        is_trial=is_trial,
    )
    main, others = _create(setup.backend, terms), OTHERS.get(setup.backend)
    open_other = None
    if others is not None and find_spec(BACKENDS[others.backend][1]) is not None:
        open_other = partial(_create, others.backend, terms)
    return WithOthers(main, others, open_other, encoder, setup.vocab_size)


def _create(name: str, terms: GrammarVocabulary) -> Backend:
    backend: Backend = import_module(BACKENDS[name][0]).create_backend(terms)
    return backend


def spell(byte_tokens: Mapping[bytes, int], text: str) -> list[int]:
    """A text as tokens of one byte each, up to the first byte that is none."""
    tokens: list[int] = []
    for byte in text.encode():
        if (token := byte_tokens.get(bytes((byte,)))) is None:
            break
        tokens.append(token)
    return tokens


def token_bytes(table: TokenTable, setup: GrammarSetup) -> list[bytes]:
    """Bytes of each token. Special tokens and eos ids are not text: a grammar never matches the letters in
    their names.

    Rows of the embedding beyond the vocabulary decode to nothing, and ids beyond the embedding cannot be
    sampled.
    """
    size = setup.vocab_size
    tokens = [text if isinstance(text, bytes) else text.encode() for text in table.texts[:size]]
    tokens += [b""] * (size - len(tokens))
    for i in {*table.special_ids, *setup.eos_ids}:
        if i < size:
            tokens[i] = b""
    return tokens


def special_tokens(table: TokenTable, setup: GrammarSetup) -> dict[str, int]:
    """Ids of the special tokens that may stand in an answer, by their texts."""
    ids = {i for i in table.special_ids if i < setup.vocab_size} - set(setup.eos_ids)
    return {
        text if isinstance(text := table.texts[i], str) else text.decode(errors="replace"): i
        for i in sorted(ids)
    }
