"""Videos whose frames stand in a prompt as images do (MiniCPM-V), against transformers with its own
processor: greedy tokens in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import runtime
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.e2e.image_prompts import MORE, TEXT
from tests.models.make_images import greedy_of
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, picture
from tests.models.make_minicpmv import MiniCpmV


def video(seed: int, frames: int, height: int, width: int) -> np.ndarray:
    """Random frames, uint8 [frames, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


IMAGE, LARGE, SMALL = picture(1, 30, 60), video(2, 2, 30, 60), video(3, 3, 20, 24)
# prompts with one placeholder a file, and the files
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one video": ([*TEXT, VIDEO_PLACEHOLDER, *MORE], [LARGE]),
    "two videos": ([VIDEO_PLACEHOLDER, *TEXT, VIDEO_PLACEHOLDER, *MORE], [SMALL, LARGE]),
    "beside an image": ([PLACEHOLDER, *TEXT, VIDEO_PLACEHOLDER, *MORE], [IMAGE, SMALL]),
}


def expected_of(
    family: MiniCpmV, model: PreTrainedModel, prompt: list[int], files: list[np.ndarray]
) -> tuple[list[int], int]:
    """Transformers' answer, and how many tokens the prompt has."""
    given: dict[str, Any] = {}
    expanded: dict[int, Any] = {}
    kinds = (PLACEHOLDER, family.prepare, 3), (VIDEO_PLACEHOLDER, family.prepare_videos, 4)
    for token, prepare, ndim in kinds:
        if some := [file for file in files if file.ndim == ndim]:
            inputs, tokens = prepare(some)
            given |= inputs
            expanded[token] = iter(tokens)
    ids = [i for token in prompt for i in (next(expanded[token]) if token in expanded else [token])]
    return greedy_of(model, ids, given, COUNT), len(ids)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("mode", "has_numbers", "options"),
    [
        pytest.param("16x", True, {"chunked_prefill_size": 12}, id="16x"),
        pytest.param("4x", False, {}, id="4x", marks=pytest.mark.full),
    ],
)
async def test_tokens_equal_transformers(
    mode: str, has_numbers: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    family = MiniCpmV(mode, has_numbers=has_numbers)
    model = family.make(tmp_path)
    expected = {name: expected_of(family, model, *prompt) for name, prompt in PROMPTS.items()}
    backwards = expected_of(family, model, PROMPTS["one video"][0], [LARGE[::-1].copy()])
    assert backwards != expected["one video"], "the order of frames matters"
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS | options) as engine:
        videos = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await videos.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        count = videos.encodings.num_encoded
        assert count == 2 * 3 + 3 + 3, "frames and slices are encoded once, wherever they stand"
