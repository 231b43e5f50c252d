"""The tokenizer: byte-level BPE trained on the corpus, with the tokens of ChatML.

Digits are tokens of their own, which makes sums and counting learnable by a model of this
size.  Punctuation takes the spaces around it along (`, ` and ` + ` and `": "`), so that lists
and JSON stay short.  Otherwise a space is a token of its own, except before the commonest
words: a name or a word is then the same tokens in a question as in quotes or in JSON, and
copying it, which most of the answers need, is learned many times faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pocket.corpus import samples
from pocket.template import template_source

VOCABULARY = 2560
CONTEXT = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
COMMON = (
    "a|all|am|an|and|answer|are|as|at|be|before|by|call|can|does|do|for|from|give|have|has|help|how|I|"
    "if|in|into|is|it|me|more|my|no|not|of|on|only|one|or|so|than|that|the|then|there|they|this|time|"
    "to|tool|use|was|what|when|where|which|who|will|"
    "with|word|you|your"
)
MARKS = r" ?[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*(?: (?=[\p{L}\p{N}]))?"
PIECES = rf" (?:{COMMON})(?!\p{{L}})|\p{{L}}+|\p{{N}}|\s*[\r\n]+|{MARKS}|\s+"


def train(seed: int = 0, texts: int = 12000) -> Tokenizer:
    """Train the tokenizer on the first conversations of a stream of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL + MARKERS),
        show_progress=False,
    )
    stream = (item.text for item in islice(samples(f"tokenizer-{seed}"), texts))
    tokenizer.train_from_iterator(_without_markers(stream), trainer)
    return _with_plain_markers(tokenizer)


def _without_markers(stream: Iterable[str]) -> list[str]:
    texts = []
    for text in stream:
        for marker in SPECIAL + MARKERS:
            text = text.replace(marker, "\n")
        texts.append(text)
    return texts


def _with_plain_markers(tokenizer: Tokenizer) -> Tokenizer:
    """Declare the think and tool markers as ordinary added tokens, kept when decoding."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))


def settings(tokenizer: Tokenizer) -> dict[str, object]:
    """Write the settings that go with the tokenizer."""
    added = {
        str(tokenizer.token_to_id(name)): {
            "content": name,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": name in SPECIAL,
        }
        for name in SPECIAL + MARKERS
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template_source(),
    }


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(settings(tokenizer), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Train the tokenizer from the command line."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of pocket.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save(train(arguments.seed), arguments.folder)


if __name__ == "__main__":
    main()
