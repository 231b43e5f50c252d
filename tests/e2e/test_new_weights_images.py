"""Images after new weights, against transformers: nothing of the old encoder answers."""

import shutil
from pathlib import Path

import pytest
import torch

import runtime
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_media import PLACEHOLDER, greedy_qwen_vl, make_qwen_vl, picture

PROMPT, IMAGE = [*b"what is", PLACEHOLDER, *b" this? "], picture(1, 40, 60)


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"disable_radix_cache": True}], ids=str)
async def test_an_image_that_came_before_is_encoded_by_the_new_weights(
    options: dict[str, bool], tmp_path: Path
) -> None:
    model = make_qwen_vl(tmp_path / "old", "2")
    before, _ = greedy_qwen_vl(model, PROMPT, [IMAGE], COUNT)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    torch.manual_seed(9)
    for weight in model.model.visual.parameters():
        torch.nn.init.normal_(weight.data, 0, 0.3)
    model.save_pretrained(tmp_path / "new")
    after, _ = greedy_qwen_vl(model, PROMPT, [IMAGE], COUNT)
    assert before != after
    async with runtime.Engine(model_path=str(tmp_path / "old"), **OPTIONS, **options) as engine:
        images = Images(engine)
        assert (await images.ask(PROMPT, [IMAGE])).token_ids == before
        await engine.update_weights_from_disk(str(tmp_path / "new"))
        assert (await images.ask(PROMPT, [IMAGE])).token_ids == after
