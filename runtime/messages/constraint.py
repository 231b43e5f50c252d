"""Constraints on the form of an answer: one rule, of one of seven kinds.

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
Kind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice", "calls", "token_tree"]


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
    """AnyText text in which tagged parts keep to a schema; `tag` is xgrammar's JSON description of it."""

    tag: Source


class Choice(Struct, frozen=True, tag="choice"):
    """One of these texts."""

    choices: A[tuple[Source, ...], Meta(min_length=1, max_length=MAX_CHOICES)]


class Lark(Struct, frozen=True, tag="lark"):
    """A text of a context-free grammar in Lark's notation, as llguidance reads it; only within Calls."""

    grammar: Source


class AnyText(Struct, frozen=True, tag="free"):
    """Any text; only within Calls. Special tokens in `marks` may be part of it."""

    marks: tuple[str, ...] = ()


class PythonArguments(Struct, frozen=True, tag="python_arguments"):
    """Keyword arguments of a call in Python, with literals; only within Calls."""


INDEX = "\ue000"  # in CallForm.begin, stands for a number


class CallForm(Struct, frozen=True):
    """How one function is called: what stands before its arguments and behind them."""

    begin: str
    arguments: JsonSchema | Lark | AnyText | PythonArguments
    end: str


class Calls(Struct, frozen=True, tag="calls"):
    """Calls of functions as a model writes them, alone, or in place of another answer, or in free text.

    `before` the first call, `between` two, `after` the last. Texts may hold special tokens. With a free
    `answer`, calls begin where the text has `trigger`, a beginning of the first form.
    """

    forms: A[tuple[CallForm, ...], Meta(min_length=1)]
    before: str = ""
    between: str = ""
    after: str = ""
    is_single: bool = False
    answer: JsonSchema | JsonObject | Regex | Ebnf | Choice | AnyText | None = None
    trigger: str = ""


Rule = JsonSchema | JsonObject | Regex | Ebnf | StructuralTag | Choice | Calls


class Grammar(Struct, frozen=True, array_like=True):
    """A rule as text. Equal rules are equal grammars, so it is the key of every cache."""

    kind: Kind
    text: str


class TreeRule(Struct, frozen=True):
    """The tree of tokens that all answers of a server follow (runtime/grammar/token_tree.py)."""

    path: str
    end_id: int  # the token that ends an answer

    @property
    def grammar(self) -> Grammar:
        """As the ranks know it."""
        return Grammar("token_tree", self.path)


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
        case Calls():
            return Grammar("calls", msgspec.json.encode(rule).decode())
