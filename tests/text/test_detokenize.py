"""Streams of tokens against the tokenizer's own decode of all of them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from runtime.text.detokenize import REPLACEMENT, TableStream, Utf8, WindowStream
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary
from tests.text import build

BYTE_LEVEL = build.byte_level()
LLAMA = build.sentencepiece()
GEMMA = build.sentencepiece(strips=False)
METASPACE = build.metaspace()
WORDPIECE = build.wordpiece()
TOKENIZERS = (BYTE_LEVEL, LLAMA, GEMMA, METASPACE, WORDPIECE)
VOCABULARIES = {id(t): Vocabulary(t, TokenizerFiles(), size=t.get_vocab_size() + 8) for t in TOKENIZERS}


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return VOCABULARIES[id(tokenizer)]


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: list[int] | None = None) -> str:
    stream = vocabulary_of(tokenizer).stream(prompt or [], skip)
    return "".join(stream.add(i) for i in ids) + stream.flush()


def id_lists(tokenizer: Tokenizer, *favourites: str) -> st.SearchStrategy[list[int]]:
    """Any ids, padding rows included, with some tokens more often than chance would have them."""
    often = [tokenizer.token_to_id(token) for token in favourites]
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 7) | st.sampled_from(often), max_size=30)


@settings(max_examples=300, deadline=None)
@given(
    id_lists(BYTE_LEVEL, "ä", "¸", "Ń", "ð", "Ł", "<|im_end|>", "<tool_call>", "日本 語", "café"),
    st.booleans(),
)
def test_byte_level_streams_are_exact_for_any_ids(ids: list[int], skip: bool) -> None:
    assert streamed(BYTE_LEVEL, ids, skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


def sentencepiece_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """SentencePiece's rule for byte tokens, written the slow way: U+FFFD for each byte that is in no
    character."""
    text = ""
    run = b""

    def close() -> str:
        out, rest = "", run
        while rest:
            for size in (1, 2, 3, 4):
                try:
                    out += rest[:size].decode()
                except UnicodeDecodeError:
                    continue
                rest = rest[size:]
                break
            else:
                out, rest = out + REPLACEMENT, rest[1:]
        return out

    for token in (tokenizer.id_to_token(i) for i in ids):
        if token is None or (skip and token in ("<s>", "</s>", "<unk>")):
            continue
        if token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
        else:
            text += close() + token.replace("▁", " ")
            run = b""
    return text + close()


@settings(max_examples=300, deadline=None)
@given(
    id_lists(GEMMA, "<0xE4>", "<0xB8>", "<0xAD>", "<0x20>", "<0xFF>", "▁hello", "</s>", "<tool>"),
    st.booleans(),
)
def test_byte_tokens_follow_sentencepiece(ids: list[int], skip: bool) -> None:
    want = sentencepiece_text(GEMMA, ids, skip)
    assert streamed(GEMMA, ids, skip) == want
    assert streamed(LLAMA, ids, skip) == want.removeprefix(" ")
    if REPLACEMENT not in want:  # `tokenizers` replaces a whole run when one byte of it is wrong
        assert LLAMA.decode(ids, skip_special_tokens=skip) == want.removeprefix(" ")
        assert GEMMA.decode(ids, skip_special_tokens=skip) == want


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([METASPACE, WORDPIECE]), st.booleans())
def test_other_decoders_are_exact(data: st.DataObject, tokenizer: Tokenizer, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=20))
    assert isinstance(vocabulary_of(tokenizer).stream(), WindowStream)
    assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("cut", range(1, 6))
def test_prompt_and_stream_make_up_the_whole_text(tokenizer: Tokenizer, cut: int) -> None:
    ids = tokenizer.encode("hello world hello hello world", add_special_tokens=False).ids
    prompt, rest = ids[:cut], ids[cut:]
    assert tokenizer.decode(prompt) + streamed(tokenizer, rest, True, prompt) == tokenizer.decode(ids)


def test_only_visible_prompt_text_keeps_the_leading_space() -> None:
    bos, hello = LLAMA.token_to_id("<s>"), LLAMA.token_to_id("▁hello")
    assert streamed(LLAMA, [hello], True, [bos]) == "hello"
    assert streamed(LLAMA, [hello], False, [bos]) == " hello"
    assert streamed(LLAMA, [hello], True, [bos, hello]) == " hello"


def test_characters_leave_as_soon_as_they_are_complete() -> None:
    stream = vocabulary_of(GEMMA).stream()
    assert [stream.add(3 + byte) for byte in "中!é".encode()] == ["", "", "中", "!", "", "é"]
    assert stream.flush() == ""


def test_at_most_three_bytes_wait() -> None:
    utf8 = Utf8(replaces_each_byte=False)
    for byte in bytes(range(0x80, 0x100)) * 8:
        utf8.feed(bytes([byte]))
        assert len(utf8.pending) <= 3


# every class of byte that the UTF-8 table of the Unicode standard (3-7) tells apart: continuations, leads and
# what is never valid
CLASSES = bytes(
    [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xE1, 0xED, 0xEE, 0xF0, 0xF1, 0xF4, 0xF5]
)


@pytest.mark.parametrize("first", CLASSES)
def test_bytes_one_at_a_time_are_the_text_of_all(first: int) -> None:
    for rest in itertools.product(CLASSES, repeat=3):
        data = bytes([first, *rest])
        utf8, each = Utf8(replaces_each_byte=False), Utf8(replaces_each_byte=True)
        assert "".join(utf8.feed(bytes([byte])) for byte in data) + utf8.flush() == data.decode(
            errors="replace"
        )
        text = "".join(each.feed(bytes([byte])) for byte in data) + each.flush()
        assert text.replace(REPLACEMENT, "") == data.decode(errors="ignore")
        assert len(text.replace(REPLACEMENT, "").encode()) + text.count(REPLACEMENT) == len(data)


def test_a_window_gives_up_waiting() -> None:
    stream = WindowStream(lambda ids: REPLACEMENT * len(ids), frozenset(), [])
    parts = [stream.add(0) for _ in range(3 * WindowStream.MAX_PENDING)]
    assert "".join(parts) == REPLACEMENT * 3 * WindowStream.MAX_PENDING
    assert stream.flush() == ""


def test_tables_stand_for_the_usual_decoders() -> None:
    assert all(isinstance(vocabulary_of(t).stream(), TableStream) for t in (BYTE_LEVEL, LLAMA, GEMMA))
