"""Images in tiles, and videos, of LLaVA-OneVision against transformers: greedy tokens in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, picture
from tests.models.make_onevision import greedy_onevision, make_onevision

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL, LARGE = picture(1, 40, 60), picture(2, 90, 30), picture(3, 7, 9), picture(4, 140, 130)
FILM = np.random.default_rng(4).integers(0, 256, (3, 24, 24, 3), dtype=np.uint8)
# prompts with one placeholder a file, and the files
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "a tall one": ([PLACEHOLDER, *MORE], [B]),
    "a small one": ([*TEXT, PLACEHOLDER], [SMALL]),
    "a large one, which is made smaller": ([*TEXT, PLACEHOLDER], [LARGE]),
    "three images": ([PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, PLACEHOLDER, *TEXT], [A, B, SMALL]),
    "text alone": ([*TEXT, *MORE], []),
    "one video": ([*TEXT, VIDEO_PLACEHOLDER, *MORE], [FILM]),
    "a video and an image": ([VIDEO_PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE], [FILM, A]),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("onevision")
    model = make_onevision(folder)
    found = {name: greedy_onevision(model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_onevision(model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [{"chunked_prefill_size": 7}, {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True}],
    ids=str,
)
async def test_tokens_equal_transformers(options: dict[str, Any], onevision: tuple[Path, Expected]) -> None:
    folder, expected = onevision
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        files = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await files.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await files.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        assert files.encodings.num_encoded == 8, "each file once, and those that were alone in tiles"
