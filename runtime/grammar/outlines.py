"""outlines-core: a regular expression as a table of states and tokens, computed whole ahead. JSON Schema
becomes a regular expression."""

from typing import Any

import numpy as np
import outlines_core
from outlines_core import json_schema

from runtime.grammar.backend import GrammarError, Terms, fill_each, find_byte_ids, first_line
from runtime.grammar.choice_syntax import choices_as_regex
from runtime.grammar.json_schema import prepare
from runtime.messages.constraint import Grammar

# keywords that it reads over in silence
UNKEPT = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "multipleOf",
        "dependentRequired",
        "dependentSchemas",
        "$dynamicRef",
        "$recursiveRef",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
        "unevaluatedItems",
    }
)


class Outlines:
    """The Backend."""

    def __init__(self, terms: Terms) -> None:
        places: dict[bytes, list[int]] = {}
        for i, token in enumerate(terms.tokens):
            if token:
                places.setdefault(token, []).append(i)
        self.byte_ids = find_byte_ids(terms)
        self._eos_id = terms.eos_ids[0]
        self._vocabulary = outlines_core.Vocabulary(self._eos_id, places)
        self._whitespace = "" if terms.is_compact else terms.whitespace_pattern

    def fill(self, matchers: "list[OutlinesMatcher]", bits: np.ndarray) -> list[int]:
        return fill_each(list(matchers), bits)

    def compile(self, grammar: Grammar) -> "OutlinesCompiled":
        try:
            return OutlinesCompiled(
                outlines_core.Index(self._pattern(grammar), self._vocabulary), self._eos_id
            )
        except (ValueError, TypeError) as error:
            raise GrammarError(first_line(error)) from error

    def _pattern(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_schema":
                schema = prepare(grammar.text, UNKEPT, "outlines")
                pattern: str = json_schema.build_regex_from_schema(schema, self._whitespace)
                return pattern
            case "regex":
                return grammar.text
            case "choice":
                return choices_as_regex(grammar.text)
            case _:
                raise GrammarError(
                    f"{grammar.kind} needs --grammar-backend xgrammar"
                    + (" or llguidance" if grammar.kind == "ebnf" else "")
                    + "; this server runs outlines, which knows regular expressions only"
                )


class OutlinesCompiled:
    """A grammar of outlines."""

    def __init__(self, index: Any, eos_id: int) -> None:
        self._index = index
        self._eos_id = eos_id

    def matcher(self) -> "OutlinesMatcher":
        return OutlinesMatcher(outlines_core.Guide(self._index), self._index, self._eos_id)


class OutlinesMatcher:
    """The Matcher."""

    def __init__(self, guide: Any, index: Any, eos_id: int) -> None:
        self._guide = guide
        self._index = index
        self._eos_id = eos_id
        self._tokens: list[int] = []  # accepted so far

    def accept(self, token: int) -> bool:
        try:
            self._guide.advance(token, False)
        except ValueError:
            return False
        self._tokens.append(token)
        return True

    def fork(self) -> "OutlinesMatcher":
        """Follows the tokens again: a guide cannot be copied."""
        other = OutlinesMatcher(outlines_core.Guide(self._index), self._index, self._eos_id)
        for token in self._tokens:
            other.accept(token)
        return other

    def fill(self, bits: np.ndarray) -> bool:
        self._guide.write_mask_into(bits.ctypes.data, bits.size, bits.itemsize)
        return True

    def forced(self) -> list[int]:
        return []  # it does not say


def open_terms(terms: Terms) -> Outlines:
    return Outlines(terms)
