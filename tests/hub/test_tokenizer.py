"""Tokenizers that are no tokenizer.json: converted once, to the ids of the libraries that they belong to."""

import base64
import io
import json
from pathlib import Path

import pytest
import tiktoken

from runtime import log
from runtime.errors import ModelError
from runtime.hub.tokenizer import converted_tokenizer, tokenizer_source
from runtime.text.vocabulary import Vocabulary

TEXT = "Hello world, hello there! 12345 größer 你好\n\n  the theme of them\t<s> 'tis"
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# the pattern by which transformers cuts texts of *.tiktoken files
LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + PATTERN
WORDS = (b"th", b"he", b"the", b"ll", b"lo", b"ell", b"hell", b"hello", b" w", b" the", b"in", b"em", b"12")
RANKS = {bytes([i]): i for i in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}


def convert(folder: Path, cache: Path) -> tuple[Path, Vocabulary]:
    source = tokenizer_source(folder)
    assert source is not None
    converted = converted_tokenizer(folder, source, cache)
    return converted, Vocabulary.load(converted)


def write_tiktoken(folder: Path) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "vocab.tiktoken").write_text("\n".join(lines))
    added = {str(len(RANKS)): {"content": "<|end|>", "special": True}}
    config = {"eos_token": "<|end|>", "added_tokens_decoder": added, "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_tiktoken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = io.StringIO()
    log.setup("info", stream=lines)
    write_tiktoken(tmp_path)
    converted, vocabulary = convert(tmp_path, tmp_path / "cache")
    wanted = tiktoken.Encoding("x", pat_str=LLAMA3_PATTERN, mergeable_ranks=RANKS, special_tokens={})
    assert vocabulary.encode(TEXT) == wanted.encode(TEXT)
    assert vocabulary.decode(vocabulary.encode(TEXT)) == TEXT
    assert vocabulary.eos_id == len(RANKS) and vocabulary.encode("<|end|>") == [len(RANKS)]
    assert vocabulary.files.templates == {"default": "{{ 1 }}"}
    assert lines.getvalue().count("converting") == 1 and "vocab.tiktoken" in lines.getvalue()
    again, _ = convert(tmp_path, tmp_path / "cache")  # no second conversion
    assert again == converted and lines.getvalue().count("converting") == 1
    assert "".join(capfd.readouterr()) == "", "a library prints nothing"
    assert [path.name for path in (tmp_path / "cache" / "tokenizers").iterdir()] == [converted.name]


def test_tekken(tmp_path: Path) -> None:
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    special_tokens = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(specials)]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(RANKS),
        "default_vocab_size": len(RANKS) + len(specials),
        "default_num_special_tokens": len(specials),
        "version": "v7",
    }
    tekken = {"config": config, "vocab": vocab, "special_tokens": special_tokens}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    _, vocabulary = convert(tmp_path, tmp_path / "cache")
    wanted = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    text = TEXT.replace("<s>", "")
    ids = [i + len(specials) for i in wanted.encode(text)]
    assert vocabulary.encode(text, add_special=False) == ids
    assert vocabulary.token_id("[INST]") == 3 and vocabulary.bos_id == 1 and vocabulary.eos_id == 2


def test_sentencepiece(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\nhello world, hello there\n" * 50)
    folder = tmp_path / "model"
    folder.mkdir()
    library.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
        )
    )
    _, vocabulary = convert(folder, tmp_path / "cache")
    wanted = library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("the lazy hello", "Hello 12 größer 你好", "over  the\n\nfox"):
        assert vocabulary.encode(text, add_special=False) == wanted.encode(text)
    assert (vocabulary.bos_id, vocabulary.eos_id) == (1, 2)


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 40)
    source = tokenizer_source(tmp_path)
    assert source is not None
    with pytest.raises(ModelError, match=r"tokenizer\.model of .* cannot be converted .*--tokenizer-path"):
        converted_tokenizer(tmp_path, source, tmp_path / "cache")
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


def test_which_file_counts(tmp_path: Path) -> None:
    assert tokenizer_source(tmp_path) is None
    (tmp_path / "tokenizer.model.v3").touch()
    assert tokenizer_source(tmp_path) == tmp_path / "tokenizer.model.v3"
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_source(tmp_path) is None
    assert tokenizer_source(tmp_path, prefers_slow=True) == tmp_path / "tokenizer.model.v3"
    (tmp_path / "tekken.json").touch()
    assert tokenizer_source(tmp_path, prefers_slow=True) == tmp_path / "tekken.json"
