"""Images of DeepSeek-OCR 2, against transformers: greedy tokens in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.errors import ModelError
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_deepseek_ocr import greedy_deepseek_ocr, make_deepseek_ocr
from tests.models.make_media import PLACEHOLDER, picture

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 30, 60), picture(2, 60, 20), picture(3, 7, 9)
LONG = OPTIONS | {"context_length": 2048, "max_total_tokens": 8192}
# prompts with one placeholder an image, and their images
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "two images": ([PLACEHOLDER, *TEXT, PLACEHOLDER], [SMALL, A]),
    "text alone": ([*TEXT, *MORE], []),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("ocr")
    model = make_deepseek_ocr(folder)
    found = {name: greedy_deepseek_ocr(model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_deepseek_ocr(model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return folder, found


@pytest.mark.anyio
async def test_tokens_equal_transformers(made: tuple[Path, Expected]) -> None:
    folder, expected = made
    options = {"chunked_prefill_size": 100, "tensor_parallel_size": 2, "mm_enable_dp_encoder": True}
    async with runtime.Engine(model_path=str(folder), **LONG | options) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await images.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert images.encodings.num_encoded == 4, "two tiles and the whole of one image, and the other"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("file", "fields", "error"),
    [
        ("preprocessor_config.json", {"tile_size": 40}, "has queries for 144 and 256"),
        ("preprocessor_config.json", {"min_patches": 9}, "min_patches 9 above max_patches 4"),
    ],
)
async def test_files_that_contradict_each_other(
    file: str, fields: dict[str, Any], error: str, made: tuple[Path, Expected], tmp_path: Path
) -> None:
    for path in made[0].iterdir():
        (tmp_path / path.name).symlink_to(path)
    known = json.loads((tmp_path / file).read_text())
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps(known | fields))
    with pytest.raises(ModelError, match=error):
        async with runtime.Engine(model_path=str(tmp_path), **LONG):
            pass
