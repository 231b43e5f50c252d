"""Constraints on the form of an answer: one rule, of one of six kinds.

A rule becomes a `Grammar`, two strings that are sent to the processes that compile it (runtime/grammar).
Nothing here depends on a backend.
"""

from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct

MAX_CHARS = 1 << 18  # characters of a rule
MAX_CHOICES = 1_024

Source = A[str, Meta(min_length=1, max_length=MAX_CHARS)]
Kind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice"]


class JsonSchema(Struct, frozen=True, tag="json_schema"):
    """A JSON text that a schema allows; `schema` is the schema as a JSON text."""

    schema: Source


class JsonObject(Struct, frozen=True, tag="json_object"):
    """Any JSON object."""


class Regex(Struct, frozen=True, tag="regex"):
    """A text that the pattern matches from its first character to its last."""

    pattern: Source


class Ebnf(Struct, frozen=True, tag="ebnf"):
    """A text of a context-free grammar, in llama.cpp's notation (GBNF); it begins with the rule `root`."""

    grammar: Source


class StructuralTag(Struct, frozen=True, tag="structural_tag"):
    """Free text in which tagged parts keep to a schema; `tag` is xgrammar's JSON description of it."""

    tag: Source


class Choice(Struct, frozen=True, tag="choice"):
    """One of these texts."""

    choices: A[tuple[Source, ...], Meta(min_length=1, max_length=MAX_CHOICES)]


Rule = JsonSchema | JsonObject | Regex | Ebnf | StructuralTag | Choice


class Grammar(Struct, frozen=True, array_like=True):
    """A rule as text. Equal rules are equal grammars, so it is the key of every cache."""

    kind: Kind
    text: str


class GrammarSetup(Struct, frozen=True, kw_only=True):
    """What processes that compile grammars must know."""

    backend: str  # a row of runtime/grammar/backend.py
    tokenizer_path: str
    vocab_size: int  # of the model: the bits of a mask
    eos_ids: tuple[int, ...]  # tokens that are allowed where a text may end
    whitespace_pattern: str | None = None  # of whitespace between the tokens of JSON
    is_compact: bool = False  # JSON without any whitespace between its tokens
    jumps: bool = True  # jump-forward: forced tokens come together, without a step for each


def grammar_of(rule: Rule) -> Grammar:
    """The grammar of a rule."""
    match rule:
        case JsonSchema(schema=text):
            return Grammar("json_schema", text)
        case JsonObject():
            return Grammar("json_schema", '{"type":"object"}')
        case Regex(pattern=text):
            return Grammar("regex", text)
        case Ebnf(grammar=text):
            return Grammar("ebnf", text)
        case StructuralTag(tag=text):
            return Grammar("structural_tag", text)
        case Choice(choices=choices):
            return Grammar("choice", msgspec.json.encode(choices).decode())
