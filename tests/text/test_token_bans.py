"""Bad words and allowed ids as token ids."""

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.messages.sampling import SamplingParams
from runtime.text.token_bans import MAX_BAD_TOKENS, packed, sequences_of, token_bans
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary
from tests.text import build

BYTES = Vocabulary(build.byte_level(), TokenizerFiles())


@pytest.mark.parametrize("word", ["hello", " hello", "  hello"])
def test_a_word_is_banned_with_and_without_a_space_before(word: str) -> None:
    found = sequences_of(word, BYTES)
    assert [BYTES.decode(ids) for ids in found] == ["hello", " hello"]


@pytest.mark.parametrize("tokenizer", [build.byte_level, build.sentencepiece])
@pytest.mark.parametrize("word", ["world", "naïve 中文", "\n", " "])
def test_words_of_several_tokens_stay_whole(tokenizer: type, word: str) -> None:
    vocabulary = Vocabulary(tokenizer(), TokenizerFiles())
    texts = [vocabulary.decode(ids).strip(" ") for ids in sequences_of(word, vocabulary)]
    assert texts and set(texts) == {word.strip(" ")}


def test_packed_bits_say_which_tokens_are_allowed() -> None:
    ids = (0, 7, 8, 300, 300)
    bits = np.unpackbits(packed(ids), bitorder="little", count=1000)
    assert set(np.flatnonzero(bits).tolist()) == set(ids)


def test_what_asks_for_nothing_bans_nothing() -> None:
    assert token_bans(SamplingParams(), BYTES) is None
    bans = token_bans(SamplingParams(bad_words=("hello", " hello")), BYTES)
    assert bans is not None and len(bans.allowed) == 0 and len(bans.bad_words) == 2


def test_too_many_tokens_are_refused() -> None:
    words = tuple(f"{i:04}" * 64 for i in range(200))
    with pytest.raises(InvalidRequest, match=str(MAX_BAD_TOKENS)) as error:
        token_bans(SamplingParams(bad_words=words), BYTES)
    assert error.value.param == "bad_words"
