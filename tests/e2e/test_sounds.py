"""Sounds through the library, against transformers: greedy tokens in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2AudioForConditionalGeneration

import runtime
from runtime.errors import InvalidRequest
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.models.make_audio import RATE, greedy_sounds, make_qwen_audio, sound
from tests.models.make_media import PLACEHOLDER

TEXT, MORE = list(b"what is"), list(b" and this? ")
SHORT, ODD, WHOLE = sound(1, 500), sound(2, 7777), sound(3, RATE)
# prompts with one placeholder a sound, and their sounds
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one sound": ([*TEXT, PLACEHOLDER, *MORE], [ODD]),
    "the longest": ([*TEXT, PLACEHOLDER], [WHOLE]),
    "several": ([PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, PLACEHOLDER, *TEXT], [WHOLE, SHORT, ODD]),
    "side by side": ([*MORE, PLACEHOLDER, PLACEHOLDER], [ODD, SHORT]),
    "text alone": ([*TEXT, *MORE], []),
}


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2AudioForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("audio")
    return folder, make_qwen_audio(folder)


@pytest.fixture(scope="module")
def expected(audio: tuple[Path, Qwen2AudioForConditionalGeneration]) -> dict[str, tuple[list[int], int]]:
    found = {name: greedy_sounds(audio[1], *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_sounds(audio[1], PROMPTS["one sound"][0], [sound(9, 7777)], COUNT)
    assert other != found["one sound"], "sounds matter"
    return found


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7},
        {"tensor_parallel_size": 2, "disable_overlap_schedule": True},
        {"page_size": 1, "speculative_algorithm": "NGRAM"},
    ],
    ids=str,
)
async def test_tokens_equal_transformers(
    options: dict[str, Any],
    audio: tuple[Path, Qwen2AudioForConditionalGeneration],
    expected: dict[str, tuple[list[int], int]],
) -> None:
    async with runtime.Engine(model_path=str(audio[0]), **OPTIONS | options) as engine:
        sounds = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await sounds.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await sounds.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        assert sounds.encodings.num_encoded == 3, "each sound is encoded once"


@pytest.mark.anyio
async def test_refusals_name_the_field(audio: tuple[Path, Qwen2AudioForConditionalGeneration]) -> None:
    async with runtime.Engine(model_path=str(audio[0]), **OPTIONS) as engine:
        sounds = Images(engine)
        with pytest.raises(
            InvalidRequest, match="media: the model takes 16000 samples a second for up to 1 s"
        ):
            await sounds.ask([PLACEHOLDER], [sound(1, RATE + 1)])
        with pytest.raises(InvalidRequest, match="media: 320 samples are too short"):
            await sounds.ask([PLACEHOLDER], [sound(1, 320)])
        with pytest.raises(InvalidRequest, match="media: this model takes sounds, and no images"):
            await sounds.ask([PLACEHOLDER], [np.zeros((8, 8, 3), np.uint8)])
