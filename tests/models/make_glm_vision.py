"""Tiny random checkpoints of GLM-4.1V and GLM-4.5V, and what transformers generates of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests.models.make import SIGMOID, SIZES, randomize, write_tokenizer
from tests.models.make_media import FRAME_TIMES_S, PLACEHOLDER, QWEN_PLACEHOLDERS, VIDEO_PLACEHOLDER
from tests.models.make_qwen3_vl import VIDEO_PREPARATION, video_pixels

Glm4v = Glm4vForConditionalGeneration | Glm4vMoeForConditionalGeneration
START, END = 253, 252  # around the tokens of an image, or of a moment
PREPARATION = VIDEO_PREPARATION | {"size": {"shortest_edge": 512, "longest_edge": 5120}}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "image_size": 20,
    "patch_size": 4,
    "out_hidden_size": SIZES["hidden_size"],
}
TEXT = SIZES | {
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
}


def make_glm_vision(folder: Path, kind: str = "dense") -> Glm4v:
    """Writes a GLM-4.1V, or with `kind` moe a GLM-4.5V, whose images are of 4 to 40 rows. -> transformers'
    model of it"""
    marks = {"image_start_token_id": START, "image_end_token_id": END} | QWEN_PLACEHOLDERS
    torch.manual_seed({"dense": 0, "moe": 1}[kind])  # answers depend on images, and have no placeholder
    model: Glm4v
    if kind == "dense":
        model = Glm4vForConditionalGeneration(Glm4vConfig(vision_config=VISION, text_config=TEXT, **marks))
    else:
        config = Glm4vMoeConfig(vision_config=VISION, text_config=TEXT | SIGMOID, **marks)
        model = Glm4vMoeForConditionalGeneration(config)
    randomize(model.eval()).save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PREPARATION))
    return model


def greedy_glm_vision(
    folder: Path, model: Glm4v, prompt: Sequence[int], files: Sequence[np.ndarray], count: int
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder a file, all of one kind, and the prompt's
    number of tokens."""
    given: dict[str, Any] = {}
    parts: list[list[int]] = []
    is_video = bool(files) and files[0].ndim == 4
    if is_video:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        prepared = [video_pixels(video) for video in files]
        given["pixel_values_videos"] = torch.cat([pixels for pixels, _ in prepared])
        given["video_grid_thw"] = torch.cat([grid for _, grid in prepared])
        parts = [video_tokens(tokenizer, *grid[0].tolist()) for _, grid in prepared]
    elif files:
        images = Glm4vImageProcessorPil(**PREPARATION)(list(files), return_tensors="pt")
        given |= {name: images[name] for name in ("pixel_values", "image_grid_thw")}
        parts = [[PLACEHOLDER] * size for size in (images["image_grid_thw"].prod(dim=1) // 4).tolist()]
    left = iter(parts)
    marks = (PLACEHOLDER, VIDEO_PLACEHOLDER)
    tokens = [i for token in prompt for i in (next(left) if token in marks else [token])]
    start, kind = len(tokens), 2 if is_video else 1
    with torch.inference_mode():
        for _ in range(count):
            kinds = [kind if token == PLACEHOLDER and at < start else 0 for at, token in enumerate(tokens)]
            model.model.rope_deltas = None  # of another prompt
            logits = model(
                input_ids=torch.tensor([tokens]),
                mm_token_type_ids=torch.tensor([kinds]) if files else None,
                use_cache=False,
                **given,
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start


def video_tokens(tokenizer: Tokenizer, count: int, rows: int, columns: int) -> list[int]:
    """The tokens of a video, with the times of its moments as Glm4vProcessor writes them."""
    tokens: list[int] = []
    for moment in range(count):
        tokens += [START, *[PLACEHOLDER] * (rows * columns // 4), END]
        tokens += tokenizer.encode(f"{int(2 * FRAME_TIMES_S * moment)}").ids
    return tokens
