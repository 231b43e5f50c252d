"""Images through the library, against transformers: greedy tokens in float32."""

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from transformers import LlavaForConditionalGeneration

import runtime
from runtime.errors import InvalidRequest
from runtime.messages.media import MediaKind, MediaSource
from tests.e2e.image_engine import COUNT, GREEDY, GROUPS, OPTIONS, Images
from tests.models.make_media import PLACEHOLDER, ROWS, greedy, make_llava, picture

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B = picture(1), picture(2, 60, 30)
# prompts with one placeholder an image, and their images
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "two images": ([PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE], [A, B]),
    "side by side, at the end": ([*MORE, PLACEHOLDER, PLACEHOLDER], [B, A]),
    "text alone": ([*TEXT, *MORE], []),
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlavaForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("llava")
    return folder, make_llava(folder)


@pytest.fixture(scope="module")
def expected(llava: tuple[Path, LlavaForConditionalGeneration]) -> dict[str, list[int]]:
    tokens = {name: greedy(llava[1], *prompt, COUNT) for name, prompt in PROMPTS.items()}
    assert greedy(llava[1], PROMPTS["one image"][0], [B], COUNT) != tokens["one image"], "images matter"
    return tokens


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7},
        {"disable_radix_cache": True, "chunked_prefill_size": 5},
        {"disable_overlap_schedule": True},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True},
        {"pipeline_parallel_size": 2, "chunked_prefill_size": 12},
        {"page_size": 1, "speculative_algorithm": "NGRAM"},
        GROUPS | {"chunked_prefill_size": 7},
        GROUPS | {"tensor_parallel_size": 4, "mm_enable_dp_encoder": True},
    ],
    ids=str,
)
async def test_tokens_equal_transformers(
    options: dict[str, Any], llava: tuple[Path, LlavaForConditionalGeneration], expected: dict[str, list[int]]
) -> None:
    async with runtime.Engine(model_path=str(llava[0]), **OPTIONS | options) as engine:
        images = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await images.ask(*prompt)
            assert answer.token_ids == expected[name], name
            assert answer.finish is not None
            assert answer.finish.prompt_tokens == len(prompt[0]) + (ROWS - 1) * len(prompt[1])
        assert await images.ask_all(PROMPTS) == expected
        assert max(images.num_encoded) == 2 and len(images.num_encoded) == options.get(
            "data_parallel_size", 1
        ), "a group encodes each image once"


@pytest.mark.anyio
async def test_prefixes_are_those_of_the_same_image(
    llava: tuple[Path, LlavaForConditionalGeneration], expected: dict[str, list[int]]
) -> None:
    prompt, (image,) = PROMPTS["one image"]
    async with runtime.Engine(model_path=str(llava[0]), **OPTIONS) as engine:
        images = Images(engine)
        cached = []
        for one in (image, image, B, image.copy()):
            answer = await images.ask(prompt, [one])
            assert answer.finish is not None
            cached.append(answer.finish.cached_tokens)
            assert (answer.token_ids == expected["one image"]) == (one is not B)
        whole = (len(prompt) + ROWS - 2) // 4 * 4
        assert cached == [0, whole, len(TEXT) // 4 * 4, whole]


@pytest.mark.anyio
async def test_preempted_sequences_and_new_ranks_go_on(
    llava: tuple[Path, LlavaForConditionalGeneration],
) -> None:
    """Long answers of which not all fit, and a rank that is killed while they run: images are encoded
    again."""
    prompts, count = list(PROMPTS.values()), 60
    async with runtime.Engine(model_path=str(llava[0]), **OPTIONS) as engine:
        undisturbed = Images(engine)
        expected = [(await undisturbed.ask(*one, max_new_tokens=count)).token_ids for one in prompts]
    options = OPTIONS | {"max_total_tokens": 160, "schedule_conservativeness": 0.1}
    async with runtime.Engine(model_path=str(llava[0]), **options) as engine:
        images = Images(engine)
        found: list[list[int]] = [[] for _ in prompts]

        async def one(index: int) -> None:
            found[index] = (await images.ask(*prompts[index], max_new_tokens=count)).token_ids

        async def kill() -> None:
            while images.scheduler.generated_tokens < 90:
                await anyio.sleep(0.001)
            os.kill(engine._core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)

        await engine.pause_generation()
        async with anyio.create_task_group() as tasks:
            for index in range(len(prompts)):
                tasks.start_soon(one, index)
            await images.continue_with(len(prompts))
            tasks.start_soon(kill)
        assert found == expected
        assert images.scheduler.totals.preemptions > 0
        assert images.encodings.num_encoded > 2


@pytest.mark.anyio
async def test_penalties_and_log_probabilities_know_placeholders(
    llava: tuple[Path, LlavaForConditionalGeneration],
) -> None:
    """What clients see of a prompt are ids of the vocabulary."""
    async with runtime.Engine(model_path=str(llava[0]), **OPTIONS) as engine:
        answer = await Images(engine).ask(
            *PROMPTS["one image"], repetition_penalty=1.3, frequency_penalty=0.5, prompt_logprobs=1
        )
        assert [one.token_id for one in answer.prompt_logprobs or []] == [*TEXT, *[PLACEHOLDER] * ROWS, *MORE]


@pytest.mark.anyio
async def test_refusals_name_the_field(llava: tuple[Path, LlavaForConditionalGeneration]) -> None:
    async with runtime.Engine(model_path=str(llava[0]), **OPTIONS) as engine:
        images = Images(engine)
        for prompt, given in ((TEXT, [A]), ([PLACEHOLDER], [A, B])):
            with pytest.raises(InvalidRequest, match="placeholders for"):
                await images.ask(prompt, given)
        with pytest.raises(InvalidRequest, match="too narrow"):
            await images.ask([PLACEHOLDER], [np.zeros((1, 90_000, 3), np.uint8)])
    options = OPTIONS | {"enable_multimodal": False}
    async with runtime.Engine(model_path=str(llava[0]), **options) as engine:
        source = MediaSource(kind=MediaKind.IMAGE, param="the_field", url="data:")
        with pytest.raises(InvalidRequest, match="the_field: this server takes text alone"):
            await engine.generate([PLACEHOLDER], media=[source])
        assert (await engine.generate(PROMPTS["text alone"][0], **GREEDY)).token_ids == greedy(
            llava[1], PROMPTS["text alone"][0], [], COUNT
        )
