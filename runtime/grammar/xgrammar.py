"""xgrammar: an automaton with a stack, whose masks are computed ahead for most of the vocabulary. Imports
torch and transformers."""

from functools import lru_cache
from typing import Any

import numpy as np
import xgrammar

from runtime.grammar.backend import MAX_BLANKS, GrammarError, Terms, find_byte_ids, first_line
from runtime.grammar.choice_syntax import choices_as_ebnf
from runtime.grammar.json_schema import prepare
from runtime.grammar.structural_tags import by_tokens
from runtime.messages.constraint import Grammar

# keywords that it reads over in silence: an answer could break them
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
    }
)
_TOP = "above_root"
# what may come after a forced text
FOLLOWING = ('"', "a", " ", "1", "\n", "}", "]", ",", ":", "{", "[", '{"', "\\", "-")
KEPT, SHORT = 1024, 256  # forced texts whose tokens are kept, letters of each
NO_TEXT = b"\xff"  # no text in UTF-8 has this byte


class XGrammar:
    """The Backend."""

    def __init__(self, terms: Terms) -> None:
        tokens = list(terms.tokens)
        for text, id in terms.special.items():
            tokens[id] = NO_TEXT + text.encode()  # an empty one could not be asked for by its id either
        self.byte_ids = find_byte_ids(terms)
        self._special = terms.special
        self._info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(terms.tokens), stop_token_ids=list(terms.eos_ids)
        )
        # we keep what is compiled
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._is_compact = terms.is_compact
        self._writer = Writer(terms)
        # in this thread: more of them take longer than the masks
        self._batch = xgrammar.BatchGrammarMatcher(1)

    def fill(self, matchers: "list[XMatcher]", bits: np.ndarray) -> list[int]:
        bits.fill(-1)  # it leaves rows alone where everything is allowed
        self._batch.batch_fill_next_token_bitmask([matcher.inner for matcher in matchers], bits)
        return []

    def compile(self, grammar: Grammar) -> "XCompiled":
        try:
            return XCompiled(self._compile(grammar), self._writer)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(first_line(error)) from error

    def _compile(self, grammar: Grammar) -> Any:
        compiler = self._compiler
        match grammar.kind:
            case "json_schema":
                schema = prepare(grammar.text, UNKEPT, "xgrammar", _bounds_as_pattern)
                separators = (",", ":") if self._is_compact else None
                return compiler.compile_json_schema(
                    schema,
                    any_whitespace=not self._is_compact,
                    separators=separators,
                    strict_mode=False,
                    max_whitespace_cnt=None if self._is_compact else MAX_BLANKS,
                )
            case "regex":
                return compiler.compile_regex(grammar.text)
            case "ebnf":
                # a root that stands within itself loses what may follow it there, so a rule of ours stands
                # above it
                return compiler.compile_grammar(f"{grammar.text}\n{_TOP} ::= root\n", root_rule_name=_TOP)
            case "structural_tag":
                return compiler.compile_structural_tag(by_tokens(grammar.text, self._special))
            case "choice":
                return compiler.compile_grammar(choices_as_ebnf(grammar.text))


def _bounds_as_pattern(node: dict[str, Any], path: str) -> None:
    """Its own bounded strings (0.2.8) may hold bare control characters, which is no JSON; its patterns do
    not."""
    low, high = node.pop("minLength", None), node.pop("maxLength", None)
    if low is None and high is None:
        return
    if "pattern" in node or "format" in node:
        raise GrammarError(
            f"at {path}: the backend xgrammar cannot keep minLength or maxLength beside pattern or format; put them into "
            "the pattern, or serve with --grammar-backend llguidance"
        )
    if any(bound is not None and (not isinstance(bound, int) or bound < 0) for bound in (low, high)):
        raise GrammarError(f"at {path}: minLength and maxLength must be whole numbers from 0 on")
    bounds = f"{low or 0},{'' if high is None else high}"
    node["pattern"] = rf'^[^\x00-\x1f"\\]{{{bounds}}}$'


class Writer:
    """Writes forced texts in tokens; the shorter ones once."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._short = lru_cache(KEPT)(self._write)

    def write(self, text: str) -> list[int]:
        """Those tokens that stay whatever follows: the last ones may be written together with it, as models
        have learnt to."""
        return (self._short if len(text) <= SHORT else self._write)(text)

    def _write(self, text: str) -> list[int]:
        tokens = self._terms.encode(text)
        # some tokenizers put a blank before
        is_text = b"".join(map(self._terms.tokens.__getitem__, tokens)) == text.encode()
        if not is_text:
            return []
        length = len(tokens) - 1
        for more in FOLLOWING:
            others = self._terms.encode(text + more)
            length = next(
                (
                    i
                    for i, (one, other) in enumerate(zip(tokens[:length], others, strict=False))
                    if one != other
                ),
                min(length, len(others)),
            )
        return tokens[:length]


class XCompiled:
    """A grammar of xgrammar."""

    def __init__(self, compiled: Any, writer: Writer) -> None:
        self._compiled = compiled
        self._writer = writer

    def matcher(self) -> "XMatcher":
        return XMatcher(xgrammar.GrammarMatcher(self._compiled), self._writer)


class XMatcher:
    """The Matcher."""

    def __init__(self, matcher: Any, writer: Writer) -> None:
        self.inner = matcher
        self._writer = writer

    def accept(self, token: int) -> bool:
        accepted: bool = self.inner.accept_token(token)
        return accepted

    def fill(self, bits: np.ndarray) -> bool:
        bits.fill(-1)
        self.inner.fill_next_token_bitmask(bits.reshape(1, -1))
        return True

    def fork(self) -> "XMatcher":
        return XMatcher(self.inner.fork(), self._writer)

    def forced(self) -> list[int]:
        try:
            text = self.inner.find_jump_forward_string()
        except UnicodeDecodeError:  # it begins or ends within a character
            return []
        return self._writer.write(text) if len(text) > 1 else []


def open_terms(terms: Terms) -> XGrammar:
    return XGrammar(terms)
