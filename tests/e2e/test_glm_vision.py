"""Images and videos of GLM-4.1V and GLM-4.5V, against transformers: greedy tokens in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_glm_vision import END, START, greedy_glm_vision, make_glm_vision
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, picture

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 40, 60), picture(2, 90, 30), picture(3, 7, 9)
FILM = np.random.default_rng(4).integers(0, 256, (6, 32, 40, 3), dtype=np.uint8)
# prompts with one placeholder a file, and the files
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "three images": ([PLACEHOLDER, *TEXT, START, PLACEHOLDER, END, *MORE, PLACEHOLDER, *TEXT], [A, B, SMALL]),
    "text alone": ([*TEXT, *MORE], []),
    "one video": ([*TEXT, START, VIDEO_PLACEHOLDER, END, *MORE], [FILM]),
    "an odd number of frames": ([VIDEO_PLACEHOLDER, *MORE], [FILM[:3]]),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module")
def glm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("glm")
    model = make_glm_vision(folder, request.param)
    found = {name: greedy_glm_vision(folder, model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_glm_vision(folder, model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("glm", "options"),
    [
        ("dense", {"chunked_prefill_size": 7, "disable_radix_cache": True}),
        ("dense", {"tensor_parallel_size": 2}),
        ("moe", {"chunked_prefill_size": 12}),
    ],
    indirect=["glm"],
    ids=str,
)
async def test_tokens_equal_transformers(options: dict[str, Any], glm: tuple[Path, Expected]) -> None:
    folder, expected = glm
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        files = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await files.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await files.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        assert files.encodings.num_encoded == 5, "each file is encoded once"
