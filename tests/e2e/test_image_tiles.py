"""Images as square tiles with tokens of their own between these, against transformers: greedy tokens in
float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.errors import ModelError
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models import make_tiles
from tests.models.make_images import greedy_images
from tests.models.make_media import PLACEHOLDER, picture
from tests.models.make_tiles import TileModel

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 30, 60), picture(2, 90, 30), picture(3, 7, 9)
# prompts with one placeholder an image, and their images
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "three images": ([PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, PLACEHOLDER, *TEXT], [A, B, SMALL]),
    "the last token": ([*MORE, PLACEHOLDER], [B]),
    "text alone": ([*TEXT, *MORE], []),
}
FAMILIES: dict[str, TileModel] = {
    "llama 4": make_tiles.Llama4(),
    "llama 4, largest canvas": make_tiles.LargestCanvas(),
    "deepseek-vl": make_tiles.DeepSeekVl(),
    "deepseek-vl, two towers": make_tiles.DeepSeekVlHybrid(),
    "aya vision": make_tiles.AyaVision(),
    "command a vision": make_tiles.Cohere2Vision(),
    "idefics 3": make_tiles.Idefics3(),
    "smolvlm": make_tiles.SmolVlm(),
}
CHUNKS: dict[str, Any] = {"chunked_prefill_size": 7, "disable_radix_cache": True}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True}
CASES = [
    ("llama 4", CHUNKS),
    ("llama 4", TWO_RANKS),
    ("llama 4, largest canvas", {}),
    ("deepseek-vl", CHUNKS),
    ("deepseek-vl, two towers", {}),
    ("aya vision", {"pipeline_parallel_size": 3}),
    ("command a vision", TWO_RANKS),
    ("idefics 3", CHUNKS),
    ("idefics 3", {"pipeline_parallel_size": 2}),
    ("smolvlm", {}),
]
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder, family = tmp_path_factory.mktemp("tiles"), FAMILIES[request.param]
    model = family.make(folder)
    found = {name: greedy_images(family, model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_images(family, model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(("made", "options"), CASES, indirect=["made"], ids=str)
async def test_tokens_equal_transformers(options: dict[str, Any], made: tuple[Path, Expected]) -> None:
    folder, expected = made
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await images.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await images.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        assert images.encodings.num_encoded == 3, "each image is encoded once"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "file", "fields", "error"),
    [
        ("llama 4", "preprocessor_config.json", {"size": {"height": 8, "width": 8}}, "tiles of 8 x 8 pixels"),
        (
            "deepseek-vl",
            "preprocessor_config.json",
            {"size": {"height": 9, "width": 9}},
            "images of 9 pixels",
        ),
        ("idefics 3", "preprocessor_config.json", {"image_std": [0, 1, 1]}, "image_std of 0"),
        ("aya vision", "config.json", {"downsample_factor": 3}, "4 patches of a side are no multiple of 3"),
    ],
)
async def test_files_that_contradict_each_other(
    family: str, file: str, fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    FAMILIES[family].make(tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelError, match=error):
        async with runtime.Engine(model_path=str(tmp_path), **OPTIONS):
            pass
