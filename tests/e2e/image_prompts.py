"""Prompts with images, what transformers answers to them, and the comparison: for tests of image encoders."""

from pathlib import Path
from typing import Any

import numpy as np

import runtime
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_images import Family, greedy_images
from tests.models.make_media import PLACEHOLDER, picture

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 30, 60), picture(2, 90, 30), picture(3, 7, 9)
# prompts with one placeholder an image, and their images
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "three images": ([PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, PLACEHOLDER, *TEXT], [A, B, SMALL]),
    "the last token": ([*MORE, PLACEHOLDER], [B]),
    "text alone": ([*TEXT, *MORE], []),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


def make_with_answers(family: Family, folder: Path) -> Expected:
    """Writes a model to `folder`. -> transformers' greedy answers to PROMPTS, which depend on the images"""
    model = family.make(folder)
    found = {name: greedy_images(family, model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_images(family, model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return found


async def check_answers(folder: Path, options: dict[str, Any], expected: Expected) -> int:
    """Asks an engine for all of them, one after the other and at once. -> how many images it has encoded"""
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await images.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await images.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        return images.encodings.num_encoded
