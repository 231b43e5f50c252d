"""A tiny random Whisper with the special tokens of the published ones, and what transformers generates of
it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.models.make import randomize, write_tokenizer
from tests.models.make_audio import RATE, SOUND_PREPARATION, TOWER

TIMES = 51  # timestamps of a second: <|0.00|>, <|0.02|> and so on
NAMES = (
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
    *(f"<|{0.02 * step:.2f}|>" for step in range(TIMES)),
)
FIRST = 259  # id of the first of NAMES
IDS = {name: FIRST + i for i, name in enumerate(NAMES)}
END = 257  # <|im_end|> of the tests' tokenizer


def make_whisper(folder: Path) -> WhisperForConditionalGeneration:
    """Writes a Whisper whose sounds last up to a second. -> transformers' model of it"""
    config = WhisperConfig(
        **TOWER,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=40,
        vocab_size=FIRST + len(NAMES),
        max_target_positions=64,
        decoder_start_token_id=IDS["<|startoftranscript|>"],
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )
    torch.manual_seed(0)
    model = randomize(WhisperForConditionalGeneration(config).eval())
    with torch.no_grad():
        for layer in model.model.decoder.layers:  # sounds shall matter more than words
            for part in ("q_proj", "k_proj", "out_proj"):
                getattr(layer.encoder_attn, part).weight.mul_(6)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": id, "content": name, "special": not name[2:3].isdigit()} | flags for name, id in IDS.items()
    ]
    path.write_text(json.dumps(tokenizer))
    (folder / "preprocessor_config.json").write_text(json.dumps(SOUND_PREPARATION))
    return model


def greedy_whisper(
    model: WhisperForConditionalGeneration, prompt: Sequence[int], sound: np.ndarray, count: int
) -> list[int]:
    """The likeliest tokens behind a prompt of the decoder, for a sound that transformers prepares."""
    features = WhisperFeatureExtractor(**SOUND_PREPARATION)(sound, sampling_rate=RATE, return_tensors="pt")[
        "input_features"
    ]
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(
                input_features=features, decoder_input_ids=torch.tensor([tokens]), use_cache=False
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
