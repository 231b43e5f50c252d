"""Images whose tokens attend to each other both ways (Gemma 3), against transformers: greedy tokens in
float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.errors import OptionsError
from tests.e2e.image_engine import COUNT, GROUPS, OPTIONS, Images
from tests.models.make_gemma_vision import PLACEHOLDER, ROWS, greedy_gemma_vision, make_gemma_vision
from tests.models.make_media import picture

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 40, 60), picture(2, 90, 30), picture(3, 7, 9)
# prompts with one placeholder an image, and their images
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "three images": ([PLACEHOLDER, *TEXT, PLACEHOLDER, PLACEHOLDER, *MORE], [A, B, SMALL]),
    "the end": ([*MORE, *TEXT, PLACEHOLDER], [B]),
    "text alone": ([*TEXT, *MORE], []),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("gemma")
    model = make_gemma_vision(folder)
    found = {name: greedy_gemma_vision(folder, model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_gemma_vision(folder, model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 17, "disable_radix_cache": True},
        {"tensor_parallel_size": 2, "chunked_prefill_size": 24},
        {"pipeline_parallel_size": 2, "disable_hybrid_swa_memory": True},
        {"page_size": 1, "speculative_algorithm": "NGRAM", "chunked_prefill_size": 16},
        GROUPS | {"chunked_prefill_size": 24},
    ],
    ids=str,
)
async def test_tokens_equal_transformers(options: dict[str, Any], gemma: tuple[Path, Expected]) -> None:
    folder, expected = gemma
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await images.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await images.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        assert max(images.num_encoded) == 3, "a replica encodes each image once"


@pytest.mark.anyio
async def test_prefixes_may_end_within_an_image(gemma: tuple[Path, Expected]) -> None:
    """What is cached of an image has seen all of it, and what is computed behind sees what is cached."""
    folder, expected = gemma
    prompt, (image,) = PROMPTS["the end"]
    tokens, length = expected["the end"]
    for page_size in (4, 16):
        async with runtime.Engine(model_path=str(folder), **OPTIONS | {"page_size": page_size}) as engine:
            images, cached = Images(engine), []
            for one in (image, picture(9, 90, 30), image.copy()):
                answer = await images.ask(prompt, [one])
                assert answer.finish is not None
                cached.append(answer.finish.cached_tokens)
                assert (answer.token_ids == tokens) == (one.tobytes() == image.tobytes())
            first = prompt.index(PLACEHOLDER) + len("\n\n") + 1  # row of the image
            assert cached[0] == 0 and cached[1] <= first
            assert cached[2] == (length - 1) // page_size * page_size
    assert first < cached[2] < first + ROWS, "in pages of 16 the prefix ends within the image"


@pytest.mark.anyio
async def test_chunks_have_room_for_an_image(gemma: tuple[Path, Expected]) -> None:
    options = OPTIONS | {"chunked_prefill_size": ROWS - 1}
    with pytest.raises(OptionsError, match=f"must be at least the {ROWS} tokens of an image"):
        async with runtime.Engine(model_path=str(gemma[0]), **options):
            pass
    async with runtime.Engine(model_path=str(gemma[0]), **options, enable_multimodal=False) as engine:
        answer = await engine.generate(PROMPTS["text alone"][0], temperature=0, max_new_tokens=COUNT)
        assert answer.token_ids == gemma[1]["text alone"][0]


@pytest.mark.anyio
async def test_preempted_sequences_compute_whole_images_again(gemma: tuple[Path, Expected]) -> None:
    """Long answers of which not all fit, in steps that an image hardly fits in."""
    folder, _ = gemma
    prompts, count = list(PROMPTS.values()), 60
    options = OPTIONS | {"chunked_prefill_size": ROWS}
    async with runtime.Engine(model_path=str(folder), **options) as engine:
        undisturbed = Images(engine)
        expected = [(await undisturbed.ask(*one, max_new_tokens=count)).token_ids for one in prompts]
    # without a bound on steps, which has images encoded one after the other
    options |= {"max_total_tokens": 200, "schedule_conservativeness": 0.1, "max_step_ms": 0}
    async with runtime.Engine(model_path=str(folder), **options) as engine:
        images = Images(engine)
        assert await images.ask_each(prompts, max_new_tokens=count) == expected
        assert images.scheduler.totals.preemptions > 0
