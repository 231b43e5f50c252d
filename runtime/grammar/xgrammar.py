"""xgrammar: a pushdown automaton whose masks are computed ahead for most of the vocabulary. Imports torch and
transformers."""

from functools import lru_cache

import numpy as np
import xgrammar

from runtime.grammar.backend import MAX_BLANKS, GrammarError, GrammarVocabulary, find_byte_ids, first_line
from runtime.grammar.choice_syntax import choices_as_ebnf
from runtime.grammar.forced_bytes import ForcedBytes
from runtime.grammar.json_schema import UNKNOWN_KEYWORDS, prepare_schema
from runtime.grammar.structural_tags import triggered_by_tokens
from runtime.json_value import JsonDict
from runtime.messages.constraint import Grammar

# keywords that the library ignores silently: an answer could violate them
UNSUPPORTED_KEYWORDS = UNKNOWN_KEYWORDS | {"multipleOf"}
_TOP = "above_root"
# texts that may follow a determined text
FOLLOWING = ('"', "a", " ", "1", "\n", "}", "]", ",", ":", "{", "[", '{"', "\\", "-")
KEPT, SHORT = 1024, 256  # determined texts whose tokens are cached, and characters of each
NO_TEXT = b"\xff"  # no text in UTF-8 has this byte


class XGrammar:
    """The backend of xgrammar. See Backend."""

    def __init__(self, terms: GrammarVocabulary) -> None:
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
        self._writer = JumpForwardEncoder(terms)

    def compile(self, grammar: Grammar) -> "XGrammarCompiled":
        """See Backend.compile."""
        try:
            return XGrammarCompiled(self._compile(grammar), self._writer)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(first_line(error)) from error

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        match grammar.kind:
            case "json_schema":
                schema = prepare_schema(grammar.text, UNSUPPORTED_KEYWORDS, "xgrammar", _bounds_as_pattern)
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
                return compiler.compile_structural_tag(triggered_by_tokens(grammar.text, self._special))
            case "choice":
                return compiler.compile_grammar(choices_as_ebnf(grammar.text))
            case "calls" | "token_tree":  # open_backend.py has another backend for them
                raise GrammarError(f"{grammar.kind} are not compiled here")


def _bounds_as_pattern(node: JsonDict, path: str) -> None:
    """minLength and maxLength as a pattern: xgrammar's own bounded strings (0.2.8) may hold raw control
    characters, which is not JSON; its patterns exclude them."""
    low, high = node.pop("minLength", None), node.pop("maxLength", None)
    if low is None and high is None:
        return
    if "pattern" in node or "format" in node:
        raise GrammarError(
            f"at {path}: the backend xgrammar cannot keep minLength or maxLength with pattern or format; "
            "put them into "
            "the pattern, or serve with --grammar-backend llguidance"
        )
    if any(bound is not None and (not isinstance(bound, int) or bound < 0) for bound in (low, high)):
        raise GrammarError(f"at {path}: minLength and maxLength must be whole numbers from 0 on")
    bounds = f"{low or 0},{'' if high is None else high}"
    node["pattern"] = rf'^[^\x00-\x1f"\\]{{{bounds}}}$'


class JumpForwardEncoder:
    """Encodes determined texts as tokens, with a cache for the shorter ones."""

    def __init__(self, terms: GrammarVocabulary) -> None:
        self.forced: ForcedBytes[XGrammarMatcher] = ForcedBytes(
            terms, lambda matcher, byte: matcher.inner.accept_string(byte)
        )
        self._terms = terms
        self._short = lru_cache(KEPT)(self._write)

    def write(self, text: str) -> list[int]:
        """The tokens of a determined text that stay the same whatever follows: the last ones may be merged
        with what follows, as models have learnt to write it."""
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


class XGrammarCompiled:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, writer: JumpForwardEncoder) -> None:
        self._compiled = compiled
        self._writer = writer
        self.num_bytes: int = compiled.memory_size_bytes

    def matcher(self) -> "XGrammarMatcher":
        """See Compiled.matcher."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._writer)


class XGrammarMatcher:
    """See Matcher."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, writer: JumpForwardEncoder) -> None:
        self.inner = matcher
        self._writer = writer

    def accept(self, token: int) -> bool:
        """See Matcher.accept."""
        accepted: bool = self.inner.accept_token(token)
        return accepted

    def fill(self, bits: np.ndarray) -> bool:
        """See Matcher.fill."""
        bits.fill(-1)
        self.inner.fill_next_token_bitmask(bits.reshape(1, -1))
        return True

    def fork(self) -> "XGrammarMatcher":
        """See Matcher.fork."""
        return XGrammarMatcher(self.inner.fork(), self._writer)

    def jump_forward(self) -> list[int]:
        """See Matcher.jump_forward."""
        # not find_jump_forward_string: for `root ::= "a" root` it does not end
        try:
            text = self._writer.forced.find(self).decode()
        except UnicodeDecodeError:  # it begins or ends within a character
            return []
        return self._writer.write(text) if len(text) > 1 else []


def create_backend(terms: GrammarVocabulary) -> XGrammar:
    """The backend for this vocabulary."""
    return XGrammar(terms)
