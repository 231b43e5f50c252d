"""Images that have tokens of their own among those of their rows (Pixtral, Mistral Small 3.1, InternVL 3),
against transformers: greedy tokens in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

import runtime
from runtime.errors import InvalidRequest, ModelError
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.e2e.image_prompts import MORE, PROMPTS, TEXT, A, Expected, check_answers, make_with_answers
from tests.models.make_images import Family, Rows, Tiles, greedy_images, greedy_of, write_internvl_chat
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, name_placeholder, picture
from tests.models.write_mistral import write_mistral

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


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("images")
    return folder, make_with_answers(FAMILIES[request.param], folder)


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
    assert await check_answers(folder, options, expected) == 3, "each image is encoded once"


@pytest.mark.anyio
@pytest.mark.parametrize("merge", [1, 2])
async def test_files_in_mistrals_own_layout(merge: int, tmp_path: Path) -> None:
    """params.json and consolidated.safetensors, without any other file that speaks of images."""
    family = Rows(merge, hidden_act="silu")
    model = family.make(tmp_path / "hf")
    write_mistral(tmp_path / "hf", tmp_path / "own")
    async with runtime.Engine(model_path=str(tmp_path / "own"), **OPTIONS) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            expected = greedy_images(family, model, *prompt, COUNT)
            assert (await images.ask(*prompt)).token_ids == expected[0], name


@pytest.mark.anyio
async def test_videos_of_internvl_are_numbered_frames(tmp_path: Path) -> None:
    family = Tiles()
    model = family.make(tmp_path)
    name_placeholder(tmp_path, "<video>", "", VIDEO_PLACEHOLDER)
    expected = film_and_image(family, model, tmp_path)
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS | {"chunked_prefill_size": 9}) as engine:
        answer = await Images(engine).ask([*TEXT, VIDEO_PLACEHOLDER, *MORE, PLACEHOLDER], [FILM, A])
    assert answer.finish is not None
    assert (answer.token_ids, answer.finish.prompt_tokens) == expected


FILM = np.random.default_rng(4).integers(0, 256, (3, 30, 20, 3), dtype=np.uint8)


def film_and_image(family: Tiles, model: PreTrainedModel, folder: Path) -> tuple[list[int], int]:
    """What transformers generates of a text with FILM and an image, and how many tokens the prompt has."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pixels, shown = family.frames(FILM, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    image, tiles = family.prepare([A])
    tokens = [*TEXT, *shown, *MORE, *tiles[0]]
    given = {"pixel_values": torch.cat((pixels, image["pixel_values"]))}
    return greedy_of(model, tokens, given, COUNT), len(tokens)


@pytest.mark.anyio
@pytest.mark.parametrize("own", [{}, {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True}])
async def test_internvl_in_its_authors_layout(own: dict[str, Any], tmp_path: Path) -> None:
    """InternVLChatModel: other names in config.json and of tensors, tiles as config.json says, and a chat
    template that takes strings. It takes videos where the tokenizer has a token for them."""
    family = Tiles(**own)
    (tmp_path / "hf").mkdir()
    model = family.make(tmp_path / "hf")
    write_internvl_chat(tmp_path / "hf", tmp_path / "own")
    if not own:
        name_placeholder(tmp_path / "own", "<|video_pad|>", "", VIDEO_PLACEHOLDER)
    async with runtime.Engine(model_path=str(tmp_path / "own"), **OPTIONS) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            expected = greedy_images(family, model, *prompt, COUNT)
            assert (await images.ask(*prompt)).token_ids == expected[0], name
        if own:
            with pytest.raises(InvalidRequest, match="takes images, and no videos"):
                await images.ask([*TEXT], [A[None]])
            return
        answer = await images.ask([*TEXT, VIDEO_PLACEHOLDER, *MORE, PLACEHOLDER], [FILM, A])
        assert answer.token_ids == film_and_image(family, model, tmp_path / "own")[0]


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
