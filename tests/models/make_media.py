"""Tiny random checkpoints of models that take images, and what transformers generates of them."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration

from runtime.messages.media import Media, MediaKind, MediaSource
from tests.models.make import SIZES, randomize, write_tokenizer

PLACEHOLDER = 255  # a byte that no text of these tests has
IMAGE_SIZE, PATCH_SIZE = 28, 7
ROWS = (IMAGE_SIZE // PATCH_SIZE) ** 2
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
PREPARATION = {
    "size": {"shortest_edge": IMAGE_SIZE},
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
}


def make_llava(folder: Path, **own: Any) -> LlavaForConditionalGeneration:
    """Writes a LLaVA of 16 rows an image. -> transformers' model of it"""
    config = LlavaConfig(
        vision_config=CLIP, text_config=SIZES | {"model_type": "llama"}, image_token_id=PLACEHOLDER, **own
    )
    torch.manual_seed(0)
    model = randomize(LlavaForConditionalGeneration(config).eval())
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    return model


def picture(seed: int, height: int = 40, width: int = 50) -> np.ndarray:
    """A random image, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def greedy(
    model: LlavaForConditionalGeneration, prompt: Sequence[int], images: Sequence[np.ndarray], count: int
) -> list[int]:
    """What transformers generates of a prompt with one placeholder an image, with its own processor."""
    tokens = [i for token in prompt for i in ([token] * (ROWS if token == PLACEHOLDER else 1))]
    start = len(tokens)
    pixels = (
        CLIPImageProcessor(**PREPARATION)(list(images), return_tensors="pt")["pixel_values"]
        if images
        else None
    )
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), pixel_values=pixels, use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:]


class ArrayLoader:
    """In place of what fetches and decodes files: sources name arrays."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def source(self, image: np.ndarray) -> MediaSource:
        """A source whose file is this array."""
        url = f"data:{sha256(image.tobytes()).hexdigest()}"
        self._arrays[url] = image
        return MediaSource(kind=MediaKind.IMAGE, param="media", url=url)

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """See MediaLoader."""
        arrays = [self._arrays[source.url] for source in sources]
        return [
            Media(
                kind=source.kind,
                param=source.param,
                digest=sha256(array.tobytes()).digest(),
                values=array[None],
            )
            for source, array in zip(sources, arrays, strict=True)
        ]
