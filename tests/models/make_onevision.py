"""Tiny random checkpoints of LLaVA-OneVision, and what transformers generates of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from tests.models.make import SIZES, randomize, write_tokenizer
from tests.models.make_gemma_vision import SIGLIP
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER

EDGE, SIDE = 20, 5
PINPOINTS = [[height * EDGE, width * EDGE] for height in (1, 2, 3) for width in (1, 2, 3)]
PREPARATION = {
    "size": {"height": EDGE, "width": EDGE},
    "image_grid_pinpoints": PINPOINTS,
    "image_mean": [0.5, 0.4, 0.6],
}


def make_onevision(folder: Path) -> LlavaOnevisionForConditionalGeneration:
    """Writes a LLaVA-OneVision of 25 rows a tile, up to 2 of which are kept. -> transformers' model of it"""
    config = LlavaOnevisionConfig(
        vision_config=SIGLIP | {"image_size": EDGE, "patch_size": EDGE // SIDE},
        text_config=SIZES | {"model_type": "qwen2"},
        image_token_index=PLACEHOLDER,
        video_token_index=VIDEO_PLACEHOLDER,
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
    )
    torch.manual_seed(0)
    model = randomize(LlavaOnevisionForConditionalGeneration(config).eval())
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    return model


def greedy_onevision(
    model: LlavaOnevisionForConditionalGeneration,
    prompt: Sequence[int],
    files: Sequence[np.ndarray],
    count: int,
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder a file, and the prompt's number of
    tokens."""
    images, videos = ([file for file in files if file.ndim == ndim] for ndim in (3, 4))
    processor = LlavaOnevisionImageProcessorPil(**PREPARATION)
    given: dict[str, Any] = {}
    sizes: dict[int, list[int]] = {PLACEHOLDER: [], VIDEO_PLACEHOLDER: []}
    if images:
        prepared = processor([images], return_tensors="pt")
        given |= {name: prepared[name] for name in ("pixel_values", "image_sizes", "batch_num_images")}
        counter = Counter(processor)
        sizes[PLACEHOLDER] = [
            SIDE**2 + 1 if len(images) > 1 else counter.rows(*image.shape[:2]) for image in images
        ]
    if videos:
        # several images are resized as frames are
        frames = [processor([[*video, video[0]]], return_tensors="pt")["pixel_values"] for video in videos]
        given["pixel_values_videos"] = torch.stack([one[:-1, 0] for one in frames])
        sizes[VIDEO_PLACEHOLDER] = [len(video) * 9 + 1 for video in videos]
    left = {token: iter(one) for token, one in sizes.items()}
    tokens = [i for token in prompt for i in [token] * (next(left[token]) if token in left else 1)]
    start = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False, **given).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start


class Counter:
    """How many rows LlavaOnevisionProcessor counts for an image that is alone in its prompt."""

    num_image_tokens, vision_aspect_ratio = SIDE**2, "anyres_max_2"
    _get_unpadded_features = LlavaOnevisionProcessor._get_unpadded_features

    def __init__(self, image_processor: LlavaOnevisionImageProcessorPil) -> None:
        self.image_processor = image_processor

    def rows(self, height: int, width: int) -> int:
        count: int = LlavaOnevisionProcessor._get_number_of_features(self, height, width, EDGE, EDGE)
        return count
