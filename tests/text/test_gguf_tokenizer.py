"""Tokenizers from GGUF files against the tokenizers from which these were written."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from runtime.errors import ModelError
from runtime.text.gguf_patterns import PATTERNS
from runtime.text.vocabulary import Vocabulary
from tests.models.make_gguf import write_tokenizer
from tests.text import build
from tests.text.test_vocabulary import TEXTS

QWEN2 = next(iter(PATTERNS["qwen2"]))


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    """A trained byte-level tokenizer that cuts as Qwen2's, and what its file gives."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = build.byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(__import__("tokenizers").Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    path = write(folder / "m.gguf", lambda writer: write_tokenizer(writer, folder))
    return tokenizer, Vocabulary.load(path)


def test_byte_level(byte_level: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, found = byte_level
    for text in TEXTS:
        wanted = tokenizer.encode(text).ids
        assert found.encode(text) == wanted
        assert found.decode(wanted) == tokenizer.decode(wanted, skip_special_tokens=False)
    assert found.special_ids == {tokenizer.token_to_id(token) for token in build.SPECIALS}
    assert found.eos_id == tokenizer.token_to_id("<|im_end|>")


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text(byte_level: tuple[Tokenizer, Vocabulary], text: str) -> None:
    tokenizer, found = byte_level
    assert found.encode(text) == tokenizer.encode(text).ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    """Merges follow from scores, which are as the ranks of the merges from which the tokens came."""
    tokenizer = build.sentencepiece(strips=prefix)
    vocabulary = tokenizer.get_vocab()
    merges = build_merges(tokenizer)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    scores = [-float(merges.get(token, len(tokens) + i)) for i, token in enumerate(tokens)]
    kinds = [
        gguf.TokenType.UNKNOWN
        if i == 0
        else gguf.TokenType.CONTROL
        if i < 3
        else gguf.TokenType.BYTE
        if i < 259
        else gguf.TokenType.NORMAL
        for i in range(len(tokens))
    ]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)
        writer.add_chat_template(
            [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]
        )

    found = Vocabulary.load(write(tmp_path / "m.gguf", fill))
    marks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks]) if prefix else marks
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    for text in ("", "hello world", " hello  a b", "中 é naïve", "he ll lo or hh", "helloworld\n"):
        assert found.encode(text) == tokenizer.encode(text).ids, text
        ids = found.encode(text, False)
        assert found.decode(ids) == text
    assert found.encode("")[:1] == [1] and found.bos_id == 1 and found.eos_id == 2
    assert found.files.templates == {"default": "A", "tool_use": "B"}


def build_merges(tokenizer: Tokenizer) -> dict[str, int]:
    """Merged token -> rank."""
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {"".join(pair): rank for rank, pair in enumerate(merges)}


def test_what_is_not_read_names_the_remedy(tmp_path: Path) -> None:
    def of(model: str, pre: str) -> Callable[[gguf.GGUFWriter], None]:
        def fill(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model(model)
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(["a", "b"])

        return fill

    for model, pre, error in (
        ("bert", "", "tokenizer of the kind bert"),
        ("gpt2", "marsian", 'cuts texts as "marsian"'),
        ("llama", "", "no score for each"),
    ):
        path = write(tmp_path / f"{model}.gguf", of(model, pre))
        with pytest.raises(ModelError, match=f"{error}.*--tokenizer-path"):
            Vocabulary.load(path)
    with pytest.raises(ModelError, match="has no tokenizer"):
        Vocabulary.load(write(tmp_path / "none.gguf", lambda writer: None))
