"""Images as square tiles with tokens of their own between these, against transformers: greedy tokens in
float32."""

import json
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.errors import ModelError
from tests.e2e.image_engine import OPTIONS
from tests.e2e.image_prompts import Expected, check_answers, make_with_answers
from tests.models import make_tiles
from tests.models.make_tiles import TileModel

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


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("tiles")
    return folder, make_with_answers(FAMILIES[request.param], folder)


@pytest.mark.anyio
@pytest.mark.parametrize(("made", "options"), CASES, indirect=["made"], ids=str)
async def test_tokens_equal_transformers(options: dict[str, Any], made: tuple[Path, Expected]) -> None:
    folder, expected = made
    assert await check_answers(folder, options, expected) == 3, "each image is encoded once"


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
