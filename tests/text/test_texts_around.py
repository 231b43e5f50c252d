"""Texts around a file are tokens of one text with what stands next to them."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.text.number_words import number_words
from runtime.text.texts_around import with_texts_around
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary

LETTERS = [*"abvuYo:", "Ġ", "Ċ"]
MERGES = [("Ġ", "Y"), ("ĠY", "o"), ("ĠYo", "u"), ("Ċ", "Ċ")]


@pytest.fixture
def vocabulary() -> Vocabulary:
    """Bytes, " You" and two newlines as one token each, and special ones <v> and <s>."""
    texts = [*LETTERS, *(first + second for first, second in MERGES)]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<v>", special=True), AddedToken("<s>", special=True)])
    return Vocabulary(tokenizer, TokenizerFiles())


@pytest.mark.parametrize(
    "text", ["a: <v>b", "<v>", "<s>a: <v>\nb<s>: <v><v>\n", "<v><s>ab<s><v>", "<s>ab\n\nb"]
)
def test_as_if_the_text_had_stood_there(text: str, vocabulary: Vocabulary) -> None:
    video = vocabulary.token_id("<v>")
    assert video is not None
    count = text.count("<v>")
    ids = with_texts_around(vocabulary.encode(text, False), {video: [("You:", "\n\n")] * count}, vocabulary)
    assert ids == vocabulary.encode(text.replace("<v>", "You:<v>\n\n"), False)
    assert with_texts_around(ids, {video: [()] * count}, vocabulary) == ids


def test_tokens_that_no_text_is_made_into_stay(vocabulary: Vocabulary) -> None:
    space, video = vocabulary.token_id("Ġ"), vocabulary.token_id("<v>")
    letters = [vocabulary.token_id(one) for one in "You"]
    assert video is not None and space is not None
    prompt = [space, *[one for one in letters if one is not None], video]
    assert vocabulary.encode(" You", False) != prompt[:-1]
    ids = with_texts_around(prompt, {video: [("a", "b")]}, vocabulary)
    assert ids == [*prompt[:-1], vocabulary.token_id("a"), video, vocabulary.token_id("b")]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (12, "twelve"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (128, "one hundred and twenty-eight"),
        (1000, "one thousand"),
        (2005, "two thousand and five"),
        (12345, "twelve thousand, three hundred and forty-five"),
    ],
)
def test_numbers_as_words(number: int, words: str) -> None:
    """As num2words writes them."""
    assert number_words(number) == words
