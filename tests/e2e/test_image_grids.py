"""Images whose tokens have positions of row and column (Qwen2-VL, Qwen2.5-VL), against transformers: greedy
tokens in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.errors import ModelError
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_media import PLACEHOLDER, greedy_qwen_vl, make_qwen_vl, picture

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 40, 60), picture(2, 90, 30), picture(3, 7, 9)
# prompts with one placeholder an image, and their images
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "three images": ([PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, PLACEHOLDER, *TEXT], [A, B, SMALL]),
    "the last token": ([*MORE, PLACEHOLDER], [B]),
    "text alone": ([*TEXT, *MORE], []),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module", params=["2", "2.5"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("qwen")
    model = make_qwen_vl(folder, request.param)
    found = {name: greedy_qwen_vl(model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    assert greedy_qwen_vl(model, PROMPTS["one image"][0], [B], COUNT)[0] != found["one image"][0]
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7, "disable_radix_cache": True},
        {"disable_overlap_schedule": True, "chunked_prefill_size": 12},
        {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True},
        {"pipeline_parallel_size": 2, "chunked_prefill_size": 12},
        {"page_size": 1, "speculative_algorithm": "NGRAM"},
    ],
    ids=str,
)
async def test_tokens_equal_transformers(options: dict[str, Any], qwen: tuple[Path, Expected]) -> None:
    folder, expected = qwen
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
async def test_cached_prefixes_keep_their_positions(qwen: tuple[Path, Expected]) -> None:
    """A prefix that ends within an image or behind it, and other images of equal size."""
    folder, expected = qwen
    prompt, (image,) = PROMPTS["one image"]
    tokens, length = expected["one image"]
    async with runtime.Engine(model_path=str(folder), **OPTIONS) as engine:
        images, cached = Images(engine), []
        for one in (image, image, picture(9, 40, 60), image.copy()):
            answer = await images.ask(prompt, [one])
            assert answer.finish is not None
            cached.append(answer.finish.cached_tokens)
            assert (answer.token_ids == tokens) == (one.tobytes() == image.tobytes())
        whole = (length - 1) // 4 * 4
        assert cached == [0, whole, len(TEXT) // 4 * 4, whole]


@pytest.mark.anyio
async def test_preempted_sequences_keep_their_positions(qwen: tuple[Path, Expected]) -> None:
    """Long answers of which not all fit: what is computed again has the same positions."""
    folder, _ = qwen
    prompts, count = list(PROMPTS.values()), 60
    async with runtime.Engine(model_path=str(folder), **OPTIONS) as engine:
        undisturbed = Images(engine)
        expected = [(await undisturbed.ask(*one, max_new_tokens=count)).token_ids for one in prompts]
    options = OPTIONS | {"max_total_tokens": 200, "schedule_conservativeness": 0.1}
    async with runtime.Engine(model_path=str(folder), **options) as engine:
        images = Images(engine)
        assert await images.ask_each(prompts, max_new_tokens=count) == expected
        assert images.scheduler.totals.preemptions > 0


@pytest.mark.anyio
async def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    make_qwen_vl(tmp_path, "2.5")
    file = tmp_path / "preprocessor_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"merge_size": 4}))
    with pytest.raises(ModelError, match="merge_size of 4, and config.json one of 2"):
        async with runtime.Engine(model_path=str(tmp_path), **OPTIONS):
            pass
