"""Images that have tokens of their own among those of their rows (Pixtral, Mistral Small 3.1, InternVL 3),
against transformers: greedy tokens in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.errors import InvalidRequest, ModelError
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_images import Family, Rows, Tiles, greedy_images
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
FAMILIES: dict[str, Family] = {
    "pixtral": Rows(1),
    "mistral small 3.1": Rows(2),
    "ministral 3": Rows(2, "ministral3"),
    "mistral small 4": Rows(2, "mistral4"),
    "internvl": Tiles(),
    "internvl, norms of all kinds": Tiles(
        use_qk_norm=True, norm_type="rms_norm", use_mean_pooling=False, attention_bias=True
    ),
}
TOWERS = [family for family in FAMILIES if family not in ("ministral 3", "mistral small 4")]
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder, family = tmp_path_factory.mktemp("images"), FAMILIES[request.param]
    model = family.make(folder)
    found = {name: greedy_images(family, model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_images(family, model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("made", "options"),
    [
        *((family, {}) for family in TOWERS),
        *((family, {"chunked_prefill_size": 7, "disable_radix_cache": True}) for family in TOWERS),
        *((family, {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True}) for family in FAMILIES),
    ],
    indirect=["made"],
    ids=str,
)
async def test_tokens_equal_transformers(options: dict[str, Any], made: tuple[Path, Expected]) -> None:
    folder, expected = made
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await images.ask(*prompt)
            assert answer.token_ids == expected[name][0], name
            assert answer.finish is not None
            assert answer.finish.prompt_tokens == expected[name][1]
        assert await images.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        assert images.encodings.num_encoded == 3, "each image is encoded once"


@pytest.mark.anyio
async def test_narrow_images_are_refused(tmp_path: Path) -> None:
    Rows(2).make(tmp_path)
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS) as engine:
        with pytest.raises(InvalidRequest, match="1 x 900 pixels is too narrow"):
            await Images(engine).ask([PLACEHOLDER], [picture(1, 900, 1)])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "file", "fields", "error"),
    [
        (Rows(2), "processor_config.json", {"image_break_token": "[ROW]"}, "no token .ROW., which"),
        (Rows(1), "preprocessor_config.json", {"size": {"longest_edge": 3}}, "size of less than 4 pixels"),
        (Rows(1), "config.json", {"vision_feature_select_strategy": "default"}, "it must be full"),
        (Tiles(), "preprocessor_config.json", {"size": {"height": 8, "width": 8}}, "tiles of 8 x 8 pixels"),
        (Tiles(), "preprocessor_config.json", {"min_patches": 9}, "min_patches 9 above max_patches 5"),
        (Tiles(), "config.json", {"downsample_ratio": 0.3}, "downsample_ratio 0.3 does not divide the 4"),
    ],
)
async def test_files_that_contradict_each_other(
    family: Family, file: str, fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    family.make(tmp_path)
    path = tmp_path / file
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | fields))
    with pytest.raises(ModelError, match=error):
        async with runtime.Engine(model_path=str(tmp_path), **OPTIONS):
            pass
