"""Tiny random checkpoints of Qwen2.5-Omni's and Qwen3-Omni's thinkers, and what transformers generates of
them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.make import EXPERTS, SIZES, randomize, write_tokenizer
from tests.models.make_audio import MELS, RATE
from tests.models.make_media import (
    FRAME_TIMES_S,
    PLACEHOLDER,
    QWEN_PREPARATION,
    QWEN_TEXT,
    QWEN_VISION,
    VIDEO_PLACEHOLDER,
    File,
    name_placeholder,
    video_pixels,
)
from tests.models.make_qwen3_vl import TEXT as TEXT_3
from tests.models.make_qwen3_vl import VISION as VISION_3

Omni = Qwen2_5OmniThinkerForConditionalGeneration | Qwen3OmniMoeThinkerForConditionalGeneration
AUDIO_PLACEHOLDER = 251
START, END, AUDIO_START, AUDIO_END = 253, 252, 250, 249  # around images and videos, and around sounds
SECONDS = 3  # of the longest sound of Qwen2.5-Omni
AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "num_mel_bins": MELS,
    "output_dim": SIZES["hidden_size"],
}
AUDIO_25 = AUDIO | {"n_window": 12}  # parts of 24 frames
AUDIO_3 = AUDIO | {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6}
VISION_25 = QWEN_VISION | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": SIZES["hidden_size"],
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
MARKS = {"vision_start_token_id": START, "audio_start_token_id": AUDIO_START}
SOUNDS = {"feature_size": MELS, "chunk_length": SECONDS, "sampling_rate": RATE, "hop_length": 160}
SEED_3 = 3
PER_SECOND = {"2.5": 25, "3": 13}  # positions


def make_omni(folder: Path, version: str) -> Omni:
    """Writes a thinker, `version` 2.5 or 3, as a model of its own. -> transformers' model of it"""
    torch.manual_seed({"2.5": 0, "3": SEED_3}[version])  # answers depend on files
    model: Omni
    if version == "2.5":
        config = Qwen2_5OmniThinkerConfig(
            audio_config=AUDIO_25,
            vision_config=VISION_25,
            text_config=QWEN_TEXT,
            image_token_index=PLACEHOLDER,
            video_token_index=VIDEO_PLACEHOLDER,
            audio_token_index=AUDIO_PLACEHOLDER,
            audio_end_token_id=AUDIO_END,
            position_id_per_seconds=PER_SECOND[version],
            **MARKS,
        )
        model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    else:
        config_3 = Qwen3OmniMoeThinkerConfig(
            audio_config=AUDIO_3,
            vision_config=VISION_3,
            text_config=TEXT_3 | EXPERTS,
            image_token_id=PLACEHOLDER,
            video_token_id=VIDEO_PLACEHOLDER,
            audio_token_id=AUDIO_PLACEHOLDER,
            position_id_per_seconds=PER_SECOND[version],
            **MARKS,
        )
        model = Qwen3OmniMoeThinkerForConditionalGeneration(config_3)
    randomize(model.eval()).save_pretrained(folder)
    write_tokenizer(folder)
    for name, id in (("<|audio_start|>", AUDIO_START), ("<|audio_end|>", AUDIO_END)):
        name_placeholder(folder, name, "", id)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_PREPARATION | SOUNDS))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(QWEN_PREPARATION))
    return model


def greedy_omni(
    model: Omni, prompt: Sequence[int], files: Sequence[File], count: int
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder a file, and the prompt's number of tokens.
    A video with its sound is a pair; then all videos are."""
    is_three = isinstance(model, Qwen3OmniMoeThinkerForConditionalGeneration)
    given: dict[str, Any] = {}
    images = [one for one in files if isinstance(one, np.ndarray) and one.ndim == 3]
    videos = [one[0] if isinstance(one, tuple) else one for one in files if is_video(one)]
    sounds = [
        one[1] if isinstance(one, tuple) else one for one in files if isinstance(one, tuple) or one.ndim == 1
    ]
    parts: dict[int, list[list[int]]] = {PLACEHOLDER: [], VIDEO_PLACEHOLDER: [], AUDIO_PLACEHOLDER: []}
    has_sound = any(isinstance(one, tuple) for one in files)
    if images:
        prepared = Qwen2VLImageProcessorPil(**QWEN_PREPARATION)(images, return_tensors="pt")
        given |= {name: prepared[name] for name in ("pixel_values", "image_grid_thw")}
        sizes = (prepared["image_grid_thw"].prod(dim=1) // 4).tolist()
        parts[PLACEHOLDER] = [[PLACEHOLDER] * size for size in sizes]
    lengths: list[int] = []
    if sounds:
        given |= mels_of(sounds, is_three)
        lengths = [
            num_rows_3(frames) if is_three else ((frames - 1) // 2 - 1) // 2 + 1
            for frames in given["feature_attention_mask"].sum(dim=1).tolist()
        ]
    if videos:
        pixels = [video_pixels(video) for video in videos]
        grids = torch.cat([grid for _, grid in pixels])
        given |= {"pixel_values_videos": torch.cat([one for one, _ in pixels]), "video_grid_thw": grids}
        given["video_second_per_grid"] = torch.tensor([2 * FRAME_TIMES_S] * len(videos))
        parts[VIDEO_PLACEHOLDER] = [[VIDEO_PLACEHOLDER] * size for size in (grids.prod(dim=1) // 4).tolist()]
    if has_sound:
        (moments, rows, columns), (length,) = grids[0].tolist(), lengths
        interleaved = interleaved_3 if is_three else interleaved_25
        parts[VIDEO_PLACEHOLDER] = [
            [AUDIO_START, *interleaved(moments, rows * columns // 4, length), AUDIO_END]
        ]
    else:
        parts[AUDIO_PLACEHOLDER] = [[AUDIO_PLACEHOLDER] * length for length in lengths]
    left = {token: iter(one) for token, one in parts.items()}
    tokens = [i for token in prompt for i in (next(left[token]) if token in left else [token])]
    start = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.tensor([tokens])
            model.model.rope_deltas = None  # of another prompt
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                use_audio_in_video=has_sound,
                **given,
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start


def is_video(file: File) -> bool:
    return isinstance(file, tuple) or file.ndim == 4


def mels_of(sounds: Sequence[np.ndarray], is_three: bool) -> dict[str, torch.Tensor]:
    """Spectrograms of sounds by transformers' feature extractor, each by itself."""
    extractor = WhisperFeatureExtractor(**SOUNDS)
    how: dict[str, Any] = {"padding": True, "truncation": False} if is_three else {}
    found = [
        extractor(one, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt", **how)
        for one in sounds
    ]
    size = max(one["input_features"].shape[2] for one in found)
    return {
        name: torch.cat([torch.nn.functional.pad(one[key], (0, size - one[key].shape[-1])) for one in found])
        for name, key in (("input_features", "input_features"), ("feature_attention_mask", "attention_mask"))
    }


def num_rows_3(frames: int) -> int:
    """Rows of Qwen3-Omni, as its processor counts them."""
    rest = (frames % 100 - 1) // 2 + 1
    return ((rest - 1) // 2 + 1 - 1) // 2 + 1 + frames // 100 * 13


def interleaved_25(moments: int, size: int, length: int) -> list[int]:
    """Moments of a second each in chunks of two, each before its sound, as in Qwen2_5OmniProcessor."""
    tokens: list[int] = []
    for chunk in range(max(-(-moments // 2), -(-length // 50))):
        tokens += [VIDEO_PLACEHOLDER] * (size * max(min(moments - 2 * chunk, 2), 0))
        tokens += [AUDIO_PLACEHOLDER] * max(min(length - 50 * chunk, 50), 0)
    return tokens


def interleaved_3(moments: int, size: int, length: int) -> list[int]:
    """Each moment before its sound from its begin on, as in Qwen3OmniMoeProcessor."""
    tokens: list[int] = []
    for moment in range(moments):
        tokens += [AUDIO_PLACEHOLDER] * (min(13 * moment, length) - tokens.count(AUDIO_PLACEHOLDER))
        tokens += [VIDEO_PLACEHOLDER] * size
    return tokens + [AUDIO_PLACEHOLDER] * (length - tokens.count(AUDIO_PLACEHOLDER))
