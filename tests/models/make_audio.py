"""A tiny random checkpoint of a model that takes sounds, and what transformers generates of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

from tests.models.make import SIZES, randomize, write_tokenizer
from tests.models.make_media import PLACEHOLDER

RATE = 16000  # samples a second
MELS = 20
TOWER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "num_mel_bins": MELS,
    "max_source_positions": 50,  # of a second
}
SOUND_PREPARATION = {"feature_size": MELS, "chunk_length": 1, "sampling_rate": RATE, "hop_length": 160}


def make_qwen_audio(folder: Path) -> Qwen2AudioForConditionalGeneration:
    """Writes a Qwen2-Audio whose sounds last up to a second and are of up to 25 rows. -> transformers' model
    of it"""
    config = Qwen2AudioConfig(
        audio_config=TOWER | {"model_type": "qwen2_audio_encoder"},
        text_config=SIZES | {"model_type": "qwen2", "use_sliding_window": False},
        audio_token_index=PLACEHOLDER,
    )
    torch.manual_seed(0)
    model = randomize(Qwen2AudioForConditionalGeneration(config).eval())
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SOUND_PREPARATION))
    return model


def sound(seed: int, count: int) -> np.ndarray:
    """A random sound, float32 [count]: a chord with noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(count) / RATE
    tones = np.sin(2 * np.pi * rng.uniform(100, 4000, (4, 1)) * times).sum(axis=0)
    return (0.1 * tones + 0.02 * rng.standard_normal(count)).astype(np.float32)


def greedy_sounds(
    model: Qwen2AudioForConditionalGeneration, prompt: Sequence[int], sounds: Sequence[np.ndarray], count: int
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder a sound, with its own feature extractor,
    and how many tokens the prompt has."""
    given: dict[str, Any] = {}
    sizes = iter(())
    if sounds:
        prepared = WhisperFeatureExtractor(**SOUND_PREPARATION)(
            list(sounds), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
        )
        mask = prepared["attention_mask"]
        given = {"input_features": prepared["input_features"], "feature_attention_mask": mask}
        sizes = iter([(((n - 1) // 2 + 1) - 2) // 2 + 1 for n in mask.sum(dim=1).tolist()])
    tokens = [i for token in prompt for i in ([token] * (next(sizes) if token == PLACEHOLDER else 1))]
    start = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.tensor([tokens])
            logits = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start
