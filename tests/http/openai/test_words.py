"""Tokens become words, and scores times, as in transformers' Whisper."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from runtime.http.openai.audio.words import Piece, first_positions, timed, words_of

# tokens of a made vocabulary; the last ones are the bytes of characters
TOKENS = [
    *(f" {text}" for text in ("a", "bc", "(", '"', "", "-")),
    "a",
    "b",
    " ",
    ".",
    ",",
    '"',
    ")",
    "!?",
    "'",
]
PARTS = list("é¿。日".encode())
BYTES = [*[token.encode() for token in TOKENS], *[bytes([part]) for part in PARTS]]


def decode(ids: list[int], **_: object) -> str:
    return b"".join([BYTES[id] for id in ids]).decode("utf-8", "replace")


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=16), st.sampled_from(["en", "zh"]))
def test_words_are_those_of_transformers(ids: list[int], language: str) -> None:
    tokenizer = SimpleNamespace(decode=decode, eos_token_id=len(BYTES))
    name = {"en": "english", "zh": "chinese"}[language]
    texts, _, places = _combine_tokens_into_words(tokenizer, ids, name)
    assert words_of(ids, decode, language) == [
        Piece(text, tuple(each)) for text, each in zip(texts, places, strict=True)
    ]


@pytest.mark.parametrize("tokens, positions", [(1, 1), (1, 9), (7, 1), (9, 9), (12, 40), (40, 12)])
def test_times_are_those_of_transformers(tokens: int, positions: int) -> None:
    rng = np.random.default_rng(tokens)
    for scores in (
        rng.standard_normal((tokens, positions), np.float32),
        rng.integers(0, 2, (tokens, positions)).astype(np.float32),  # many ways of the same cost
    ):
        texts, times = _dynamic_time_warping(-scores.astype(np.float64))
        first = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
        assert first_positions(scores).tolist() == times[first].tolist()


def test_scores_that_say_nothing_are_times_of_the_beginning() -> None:
    assert first_positions(np.full((3, 5), np.nan, np.float32)).tolist() == [0, 0, 0]


def test_a_word_lasts_from_the_time_of_the_token_before_it() -> None:
    words = timed(
        [Piece(" a", (0,)), Piece(" ", (1,)), Piece(" bc", (2, 3))], 1, [0.1, 0.3, 0.4, 0.5, 0.9], 10.0, 10.8
    )
    assert [(one.word, one.start, one.end) for one in words] == [("a", 10.1, 10.3), ("bc", 10.4, 10.8)]
