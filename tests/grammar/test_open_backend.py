"""A backend over a folder's vocabulary: other libraries for what its own does not know, and the tokenizer
read only when a text is forced."""

from pathlib import Path
from threading import get_ident

import pytest
from msgspec import structs

import runtime
from runtime.grammar import open_backend as open_backend_module
from runtime.grammar.backend import GrammarError
from runtime.grammar.open_backend import Encoder, open_backend, spell
from runtime.messages.constraint import GrammarSetup, JsonSchema, Regex, StructuralTag, grammar_of
from runtime.text import token_table
from runtime.text.vocabulary import Vocabulary, table_of

POCKET, SIZE = Path(runtime.__file__).parent / "pocket", 2560
SETUP = GrammarSetup(backend="llguidance", tokenizer_path=str(POCKET), vocab_size=SIZE, eos_ids=(2,))
TAG = grammar_of(StructuralTag('{"format": {"type": "const_string", "value": "hello"}}'))
FORCED = grammar_of(
    JsonSchema('{"type": "object", "properties": {"a long name": {"const": 1}}, "required": ["a long name"]}')
)


def test_structural_tags_are_compiled_by_the_library_that_knows_them() -> None:
    matcher = open_backend(SETUP).compile(TAG).matcher()
    assert all([matcher.accept(token) for token in Vocabulary.load(POCKET, SIZE).encode("hello", False)])
    assert not matcher.accept(Vocabulary.load(POCKET, SIZE).encode("o", False)[0])
    with pytest.raises(GrammarError, match="xgrammar"):
        open_backend(structs.replace(SETUP, backend="outlines")).compile(TAG)


def test_so_are_schemas_with_keywords_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = '{"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"const": 1}}'
    grammar = grammar_of(JsonSchema(schema))
    vocabulary = Vocabulary.load(POCKET, SIZE)
    matcher = open_backend(structs.replace(SETUP, is_compact=True)).compile(grammar).matcher()
    assert all([matcher.accept(token) for token in vocabulary.encode('{"a":1}', False)])
    monkeypatch.setattr(open_backend_module, "find_spec", lambda name: None)
    with pytest.raises(GrammarError, match=r"at \$.propertyNames"):
        open_backend(SETUP).compile(grammar)


def test_a_wrong_expression_is_refused_with_what_is_wrong() -> None:
    with pytest.raises(GrammarError, match=r'invalid regex "\[a": unclosed character class$'):
        open_backend(SETUP).compile(grammar_of(Regex("[a")))


@pytest.mark.parametrize("value", ["false", "null"])
def test_keywords_that_say_nothing_are_dropped(value: str) -> None:
    text = f'{{"type": "array", "items": {{"const": 1}}, "uniqueItems": {value}}}'
    assert open_backend(SETUP).compile(grammar_of(JsonSchema(text))).matcher()


def test_a_trial_spells_forced_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And so it reads no tokenizer where the table of the tokens is kept."""
    vocabulary = Vocabulary.load(POCKET, SIZE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(token_table, "SMALLEST", 1)
    vocabulary.keep_table()
    assert table_of(POCKET, SIZE) is not None
    monkeypatch.setattr(Encoder, "load", None)  # fails where a tokenizer is read
    trial = open_backend(structs.replace(SETUP, is_compact=True), is_trial=True)
    matcher = trial.compile(FORCED).matcher()
    assert matcher.accept(vocabulary.encode("{", add_special=False)[-1])
    forced = matcher.jump_forward()
    assert vocabulary.decode(forced) == '"a long name":1}' and len(forced) == len('"a long name":1}')


def test_the_tokenizer_is_read_once_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher that read it would be given up, because the time of a step is bounded."""
    readers: list[int] = []
    vocabulary = Vocabulary.load(POCKET, SIZE)

    def read(folder: Path, size: int) -> Vocabulary:
        readers.append(get_ident())
        return vocabulary

    monkeypatch.setattr(Vocabulary, "load", read)
    encoder = Encoder(POCKET, SIZE)
    assert not readers
    assert encoder("a text") == encoder("a text") == vocabulary.encode("a text", add_special=False)
    assert len(readers) == 1 and readers[0] != get_ident()
    assert Encoder(POCKET, SIZE, vocabulary)("a") == vocabulary.encode("a", False) and len(readers) == 1


def test_a_text_is_spelled_up_to_a_byte_without_a_token() -> None:
    assert spell({b"a": 7, b"b": 9}, "abca") == [7, 9]
