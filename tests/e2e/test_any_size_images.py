"""Images of any size whose tokens have a position each (Kimi-VL, Kimi K2.5, MiniCPM-V), against transformers:
greedy tokens in float32."""

import json
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.errors import InvalidRequest, ModelError
from tests.e2e.image_engine import OPTIONS, Images
from tests.e2e.image_prompts import MORE, SMALL, TEXT, A, Expected, check_answers, make_with_answers
from tests.models.make_images import Family
from tests.models.make_media import PLACEHOLDER, picture
from tests.models.make_minicpmv import MiniCpmV
from tests.models.make_moonvit import Kimi

FAMILIES: dict[str, Family] = {
    "kimi, as transformers writes it": Kimi("transformers"),
    "kimi k2.5": Kimi("kimi k2.5"),
    "kimi-vl": Kimi("kimi-vl"),
    "minicpm-v": MiniCpmV(),
    "minicpm-v, 4x": MiniCpmV("4x", has_numbers=False),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("kimi, as transformers writes it", {"chunked_prefill_size": 7, "disable_radix_cache": True}),
    ("kimi k2.5", {"pipeline_parallel_size": 2}),
    ("kimi-vl", {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True}),
    ("minicpm-v", {"chunked_prefill_size": 12}),
    ("minicpm-v", {"tensor_parallel_size": 2, "disable_radix_cache": True}),
    ("minicpm-v, 4x", {}),
]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("images")
    return folder, make_with_answers(FAMILIES[request.param], folder)


@pytest.mark.anyio
@pytest.mark.parametrize(("made", "options"), CASES, indirect=["made"], ids=str)
async def test_tokens_equal_transformers(options: dict[str, Any], made: tuple[Path, Expected]) -> None:
    folder, expected = made
    await check_answers(folder, options, expected)


@pytest.mark.anyio
async def test_slices_are_encoded_once(tmp_path: Path) -> None:
    """An image's slices are encodings of their own, which its number in a prompt does not change."""
    MiniCpmV().make(tmp_path)
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS) as engine:
        images = Images(engine)
        await images.ask([PLACEHOLDER, *MORE], [A])
        count = images.encodings.num_encoded
        assert count == 1 + 2, "the whole image, and two slices"
        await images.ask([PLACEHOLDER, *TEXT, PLACEHOLDER], [SMALL, A])
        assert images.encodings.num_encoded == count + 1


@pytest.mark.anyio
@pytest.mark.parametrize("family", ["kimi-vl", "minicpm-v"])
async def test_narrow_images_are_refused(family: str, tmp_path: Path) -> None:
    FAMILIES[family].make(tmp_path)
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS) as engine:
        with pytest.raises(InvalidRequest, match="1 x 900 pixels is too narrow"):
            await Images(engine).ask([PLACEHOLDER], [picture(1, 900, 1)])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "file", "fields", "error"),
    [
        ("kimi-vl", "preprocessor_config.json", {"pad_input": False}, "pad_input false, which cuts"),
        ("kimi-vl", "preprocessor_config.json", {"patch_size": 5}, "has patches of 5 pixels"),
        ("minicpm-v", "preprocessor_config.json", {"downsample_mode": "4x"}, "a downsample_mode of 4x"),
        ("minicpm-v", "config.json", {"merger_times": 2}, "merger_times 2 are not"),
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
