"""How forced texts are written with the embedded model's tokenizer: no token of them would be another if more
came."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import runtime
from runtime.grammar.backend import GrammarVocabulary
from runtime.grammar.xgrammar import JumpForwardEncoder

TOKENIZER = Tokenizer.from_file(str(Path(runtime.__file__).parent / "pocket" / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def writer() -> JumpForwardEncoder:
    tokens = [
        TOKENIZER.decode([i], skip_special_tokens=False).encode() for i in range(TOKENIZER.get_vocab_size())
    ]
    return JumpForwardEncoder(GrammarVocabulary(tokens=tokens, encode=encode, eos_ids=(0,), is_compact=False))


@pytest.mark.parametrize(
    "text", ['{"name": "get_weather", "arguments": {', '"arguments": ', '{"city": "', '"days": 4', "[[1, "]
)
def test_what_is_forced_stays_whatever_follows(writer: JumpForwardEncoder, text: str) -> None:
    written = writer.write(text)
    for more in ('"', '"city": 1', "x", " y", "7", "}", "]", "\n", ", "):
        assert encode(text + more)[: len(written)] == written


def test_a_long_text_is_mostly_forced(writer: JumpForwardEncoder) -> None:
    text = '{"name": "get_weather", "arguments": {'
    assert len(writer.write(text)) >= len(encode(text)) - 3
