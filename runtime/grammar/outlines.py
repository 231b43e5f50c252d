"""outlines-core: a regular expression as a table of states and tokens, computed ahead in full. JSON Schema
becomes a regular expression."""

import numpy as np
import outlines_core
from outlines_core import json_schema

from runtime.grammar.backend import GrammarError, GrammarVocabulary, find_byte_ids, first_line
from runtime.grammar.choice_syntax import choices_as_regex
from runtime.grammar.json_schema import UNKNOWN_KEYWORDS, prepare_schema
from runtime.messages.constraint import Grammar

# keywords that the library ignores silently
UNSUPPORTED_KEYWORDS = UNKNOWN_KEYWORDS | {
    "multipleOf",
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


class Outlines:
    """The backend of outlines-core. See Backend."""

    def __init__(self, terms: GrammarVocabulary) -> None:
        ids_of: dict[bytes, list[int]] = {}
        for i, token in enumerate(terms.tokens):
            if token:
                ids_of.setdefault(token, []).append(i)
        self.byte_ids = find_byte_ids(terms)
        self._eos_id = terms.eos_ids[0]
        self._vocabulary = outlines_core.Vocabulary(self._eos_id, ids_of)
        self._whitespace = "" if terms.is_compact else terms.whitespace_pattern

    def compile(self, grammar: Grammar) -> "OutlinesCompiled":
        """See Backend.compile."""
        try:
            return OutlinesCompiled(
                outlines_core.Index(self._pattern(grammar), self._vocabulary), self._eos_id
            )
        except (ValueError, TypeError) as error:
            raise GrammarError(first_line(error)) from error

    def _pattern(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_schema":
                schema = prepare_schema(grammar.text, UNSUPPORTED_KEYWORDS, "outlines")
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
    """A compiled grammar."""

    def __init__(self, index: outlines_core.Index, eos_id: int) -> None:
        self._index = index
        self._eos_id = eos_id
        self.num_bytes = len(index.__reduce__()[1][0])  # its table in binary form

    def matcher(self) -> "OutlinesMatcher":
        """See Compiled.matcher."""
        return OutlinesMatcher(outlines_core.Guide(self._index), self._index, self._eos_id)


class OutlinesMatcher:
    """See Matcher."""

    def __init__(self, state: outlines_core.Guide, index: outlines_core.Index, eos_id: int) -> None:
        self._state = state
        self._index = index
        self._eos_id = eos_id
        self._tokens: list[int] = []  # accepted so far

    def accept(self, token: int) -> bool:
        """See Matcher.accept."""
        try:
            self._state.advance(token, False)
        except ValueError:
            return False
        self._tokens.append(token)
        return True

    def fork(self) -> "OutlinesMatcher":
        """Accepts the same tokens again, because the library's state cannot be copied."""
        other = OutlinesMatcher(outlines_core.Guide(self._index), self._index, self._eos_id)
        for token in self._tokens:
            other.accept(token)
        return other

    def fill(self, bits: np.ndarray) -> bool:
        """See Matcher.fill."""
        self._state.write_mask_into(bits.ctypes.data, bits.size, bits.itemsize)
        return True

    def jump_forward(self) -> list[int]:
        """Nothing: the library does not report determined texts."""
        return []  # it does not say


def create_backend(terms: GrammarVocabulary) -> Outlines:
    """The backend for this vocabulary."""
    return Outlines(terms)
