"""Small tokenizers of each kind that model folders hold, made on the spot."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello tokens!",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Überraschung im Straßencafé: naïve façade, déjà vu, 中文字符 и немного русского.",
    'What is 12 + 30? The answer is 42. Stop here. <tool_call> {"name": "weather"}',
] * 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """Qwen and Llama 3 style: byte-level BPE; special tokens, one added token that is not special, one
    outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("日本 語", normalized=False), "café"]
    )
    return tokenizer


def _sentencepiece_vocab() -> dict[str, int]:
    words = [
        "▁",
        "▁▁",
        "▁hello",
        "hello",
        "▁world",
        "world",
        "a",
        "▁a",
        "b",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "中",
        "é",
        "he",
        "ll",
        "▁h",
        "lo",
        "or",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {token: i for i, token in enumerate(tokens)}


def sentencepiece(strips: bool = True) -> Tokenizer:
    """Llama 2 (`strips`) and Gemma style: BPE over text with ▁ for spaces, and byte tokens for what is
    missing."""
    merges = [("h", "e"), ("l", "l"), ("l", "o"), ("o", "r"), ("▁", "h"), ("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_sentencepiece_vocab(), merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5 style: Unigram with a Metaspace decoder, which is no sum of its tokens."""
    scores = {
        "<unk>": 0.0,
        "</s>": 0.0,
        "▁": -2.0,
        "▁hello": -1.0,
        "▁world": -1.0,
        "s": -3.0,
        "!": -3.0,
        "▁a▁b": -4.0,
    }
    tokenizer = Tokenizer(models.Unigram(list(scores.items()), unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT style: words and their continuations."""
    words = ["[UNK]", "[CLS]", "hello", "world", "##s", "##ing", "!", ",", "play"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]", "[UNK]"])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """A model folder's tokenizer files, as transformers would load them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config), encoding="utf-8"
    )
    return folder
