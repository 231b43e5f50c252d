"""llguidance: regular expressions by derivatives under an Earley parser; nothing is computed ahead. Needs
neither torch nor numpy."""

from ctypes import addressof, c_char

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from runtime.grammar.backend import MAX_BLANKS, GrammarError, GrammarVocabulary, find_byte_ids
from runtime.grammar.call_grammar import CallGrammar
from runtime.grammar.choice_syntax import choices_as_regex
from runtime.grammar.json_schema import UNKNOWN_KEYWORDS, prepare_schema
from runtime.json_value import JsonDict
from runtime.messages.constraint import Calls, Grammar

# keywords that the library does not know, refused here with their path
UNSUPPORTED_KEYWORDS = UNKNOWN_KEYWORDS | {"propertyNames"}


class _TokenizerAdapter:
    """The vocabulary in the form that LLTokenizer reads."""

    def __init__(self, terms: GrammarVocabulary) -> None:
        self.eos_token_id = terms.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [token or f"<|{i}|>".encode() for i, token in enumerate(terms.tokens)]
        self._encode = terms.encode
        self.special_token_ids = [i for i, token in enumerate(terms.tokens) if not token]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a determined text: of all ways to write it, the mask allows this one."""
        if not isinstance(text, str):
            raise TypeError("only texts are encoded")  # it tries bytes once, and then knows
        return self._encode(text)


OWN_BYTES, CHAR_BYTES = 64 * 1024, 128  # of a compiled grammar, and for each character of it


class LLGuidance:
    """The backend of llguidance. See Backend."""

    def __init__(self, terms: GrammarVocabulary) -> None:
        self.byte_ids = find_byte_ids(terms)
        self._special = terms.special
        # tables by which masks of strings are filled faster take as long to make as all the rest
        slices: list[str] | None = [] if terms.is_trial else None
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_TokenizerAdapter(terms)), len(terms.tokens), list(terms.eos_ids), slices
        )
        self._json: dict[str, object] = {"whitespace_flexible": not terms.is_compact}
        if not terms.is_compact:
            self._json["whitespace_pattern"] = terms.whitespace_pattern or rf"[ \n\r\t]{{1,{MAX_BLANKS}}}"

    def compile(self, grammar: Grammar) -> "LLGuidanceCompiled":
        """See Backend.compile."""
        source = self._source(grammar)
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return LLGuidanceCompiled(matcher, len(source))

    def _source(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_schema":
                schema = prepare_schema(grammar.text, UNSUPPORTED_KEYWORDS, "llguidance", _drop_unset)
                convert = LLMatcher.grammar_from_json_schema
                return convert(schema, overrides=self._json)  # type: ignore[arg-type]
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "ebnf":
                return LLMatcher.grammar_from_lark(_lark_of(grammar.text))
            case "calls":
                calls = msgspec.json.decode(grammar.text, type=Calls)
                return CallGrammar(self._special, self._json, _lark_of).write(calls)
            case "choice":
                return LLMatcher.grammar_from_regex(choices_as_regex(grammar.text))
            case "structural_tag":
                raise GrammarError("structural tags need xgrammar: pip install 'runtime-serve[grammar]'")
            case "token_tree":
                raise GrammarError("trees of tokens are not compiled here")  # but by open_backend.py


class LLGuidanceCompiled:
    """A compiled grammar. Matchers that are copied from one another share what they compute about it."""

    def __init__(self, first: LLMatcher, num_chars: int) -> None:
        """`num_chars`: of the grammar in the library's own syntax."""
        self._first = first
        self.num_bytes = OWN_BYTES + CHAR_BYTES * num_chars

    def matcher(self) -> "LLGuidanceMatcher":
        """See Compiled.matcher."""
        return LLGuidanceMatcher(self._first.deep_copy())


class LLGuidanceMatcher:
    """See Matcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.inner = matcher

    def accept(self, token: int) -> bool:
        """See Matcher.accept."""
        return self.inner.consume_token(token)

    def fill(self, bits: np.ndarray) -> bool:
        """See Matcher.fill."""
        address = addressof(c_char.from_buffer(bits.data))  # a fifth of the time of bits.ctypes.data
        self.inner.unsafe_compute_mask_ptr(address, bits.nbytes)
        return not self.inner.is_error()

    def fork(self) -> "LLGuidanceMatcher":
        """See Matcher.fork."""
        return LLGuidanceMatcher(self.inner.deep_copy())

    def jump_forward(self) -> list[int]:
        """See Matcher.jump_forward."""
        return self.inner.compute_ff_tokens()


def _drop_unset(node: JsonDict, path: str) -> None:
    """`uniqueItems: false` and the like say nothing, and the library refuses them all the same."""
    for key in UNSUPPORTED_KEYWORDS & node.keys():
        if node[key] is None or node[key] is False:
            del node[key]


def _lark_of(ebnf: str) -> str:
    """Lark's notation of GBNF. Raises GrammarError."""
    try:
        return any_to_lark(ebnf)
    except Exception as error:  # the library's reader of GBNF raises whatever comes up
        raise GrammarError(f"the EBNF can't be read: {error}") from error


def _reason(matcher: LLMatcher) -> str:
    """What is wrong with a grammar, as one line. A regular expression's parser says it in its last line."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    first = lines[0] if lines else "the grammar cannot be read"
    faults = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return first.replace(" (in regex): regex parse error:", f": {faults[0]}") if faults else first


def create_backend(terms: GrammarVocabulary) -> LLGuidance:
    """The backend for this vocabulary."""
    return LLGuidance(terms)
