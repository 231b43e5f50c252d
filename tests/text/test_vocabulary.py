"""Ids and texts against transformers' PreTrainedTokenizerFast for the same folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from runtime.errors import InvalidRequest, ModelError
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary
from tests.text import build

TEXTS = [
    "",
    " ",
    "hello world",
    " hello  world ",
    "Hello,\n\nworld!\t42",
    "naïve 中文 👍🏽 \x00",
    "<|im_start|>user\nhi<|im_end|>",
    "<s> hello</s>world",
    '<tool_call>{"a": 1}</tool_call>',
    "日本 語 café",
    "e\u0301",
]

FOLDERS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "qwen": (
        build.byte_level,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False},
    ),
    "deepseek": (
        build.byte_level,
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "add_eos_token": False,
        },
    ),
    "both_ends": (
        build.byte_level,
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "add_eos_token": True,
        },
    ),
    "llama": (
        build.sentencepiece,
        {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "unk_token": "<unk>"},
    ),
    "no_bos": (build.sentencepiece, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}),
    "gemma": (lambda: build.sentencepiece(strips=False), {"bos_token": "<s>", "eos_token": "</s>"}),
    "metaspace": (build.metaspace, {"eos_token": "</s>"}),
    "wordpiece": (build.wordpiece, {"unk_token": "[UNK]"}),
    "named_only_in_config": (
        build.byte_level,
        {"eos_token": "<eot>", "additional_special_tokens": ["<extra>"]},
    ),
    "added_in_config": (
        build.byte_level,
        {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                "600": {
                    "content": "<think>",
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "single_word": False,
                    "special": False,
                },
                "601": {
                    "content": "<eot>",
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "single_word": False,
                    "special": True,
                },
            },
        },
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_parity_with_transformers(name: str, tmp_path: Path) -> None:
    make, config = FOLDERS[name]
    folder = build.save(tmp_path, make(), **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = Vocabulary.load(folder)
    for text in [*TEXTS, "a<eot>b<extra>c<think>d"]:
        for add_special in (True, False):
            ids = theirs.encode(text, add_special_tokens=add_special)
            assert ours.encode(text, add_special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.bos_id == theirs.bos_token_id and ours.eos_id == theirs.eos_token_id
    assert ours.special_ids >= set(theirs.all_special_ids)


BYTE_LEVEL = Vocabulary(build.byte_level(), TokenizerFiles(), size=512)
GEMMA = Vocabulary(build.sentencepiece(strips=False), TokenizerFiles())


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_token_bytes_add_up_to_the_text(text: str) -> None:
    for vocabulary in (GEMMA, BYTE_LEVEL):
        ids = vocabulary.encode(text, add_special=False)
        assert b"".join(map(vocabulary.token_bytes, ids)).decode() == vocabulary.decode(ids)


@pytest.mark.parametrize(("token_id", "piece"), [(-1, b""), (511, b""), (10**9, b"")])
def test_ids_without_a_token(token_id: int, piece: bytes) -> None:
    assert BYTE_LEVEL.token_bytes(token_id) == piece


def test_token_bytes_may_be_half_a_character() -> None:
    ids = BYTE_LEVEL.encode("🦜", add_special=False)
    assert len(ids) > 1
    assert [BYTE_LEVEL.token_bytes(i) for i in ids] != [b""] and b"".join(
        map(BYTE_LEVEL.token_bytes, ids)
    ) == "🦜".encode()


def test_padding_rows_of_the_embedding_decode_to_nothing() -> None:
    stream = BYTE_LEVEL.stream()
    assert [stream.add(511), stream.add(BYTE_LEVEL.encode("a", False)[0]), stream.flush()] == ["", "a", ""]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not Unicode"):
        BYTE_LEVEL.encode("a\ud83d")


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer.json; give .*--tokenizer-path.* or save"):
        Vocabulary.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json of .* can't be read"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "needs name and template"),
        ("tokenizer_config.json", '{"chat_template": 3}', "must be a string"),
        ("chat_template.json", "nonsense", "chat_template.json is not a JSON object"),
    ],
)
def test_broken_files(name: str, content: str, message: str, tmp_path: Path) -> None:
    build.save(tmp_path, build.wordpiece())
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        Vocabulary.load(tmp_path)


def test_templates_and_their_precedence(tmp_path: Path) -> None:
    build.save(
        tmp_path,
        build.wordpiece(),
        chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}],
    )
    assert Vocabulary.load(tmp_path).files.templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "C"}), encoding="utf-8")
    assert Vocabulary.load(tmp_path).files.templates == {"default": "C", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("D", encoding="utf-8")
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "rag.jinja").write_text("E", encoding="utf-8")
    assert Vocabulary.load(tmp_path).files.templates == {"default": "D", "tool_use": "B", "rag": "E"}


def test_named_tokens_of_older_folders(tmp_path: Path) -> None:
    build.save(tmp_path, build.byte_level())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}}), encoding="utf-8"
    )
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.eos_id == vocabulary.token_id("<|im_end|>") is not None


@pytest.mark.parametrize("name", ["qwen", "llama", "metaspace"])  # both kinds of tables, and none
def test_special_tokens_that_are_shown(name: str, tmp_path: Path) -> None:
    make, config = FOLDERS[name]
    ours = Vocabulary.load(
        build.save(tmp_path, make(), **config | ({"unk_token": "<unk>"} if name == "metaspace" else {}))
    )
    shown, hidden = {
        "qwen": ("<|im_start|>", "<|im_end|>"),
        "llama": ("<s>", "</s>"),
        "metaspace": ("</s>", "<unk>"),
    }[name]
    ids = [
        ours.token_id("hello") or ours.encode("hello", False)[0],
        ours.token_id(hidden),
        ours.token_id(shown),
        ours.token_id(hidden),
    ]
    texts = {}
    for marks in ((), (f"before {shown} and after",)):
        stream = ours.stream(ids[:1], True, marks)
        texts[bool(marks)] = ("".join([stream.add(i) for i in ids if i is not None]) + stream.flush()).strip()
    assert shown not in texts[False] and shown in texts[True] and hidden not in texts[True]
