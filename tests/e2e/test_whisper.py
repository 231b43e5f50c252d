"""Whisper, whose decoder attends to the encoding of a sound, against transformers: greedy tokens in
float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperForConditionalGeneration

import runtime
from runtime.errors import InvalidRequest
from tests.e2e.image_engine import COUNT, GREEDY, OPTIONS, Images
from tests.models.make_audio import RATE, sound
from tests.models.make_whisper import IDS, greedy_whisper, make_whisper

HEAD = [IDS[f"<|{name}|>"] for name in ("startoftranscript", "en", "transcribe", "notimestamps")]
SHORT, ODD, WHOLE = sound(1, 500), sound(2, 7777), sound(3, RATE)
# prompts, and the sound of each
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "short": (HEAD, [SHORT]),
    "whole": (HEAD, [WHOLE]),
    "one token": (HEAD[:1], [ODD]),
    "text before": ([IDS["<|startofprev|>"], *b"so far it was", *HEAD], [ODD]),
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, make_whisper(folder)


@pytest.fixture(scope="module")
def expected(whisper: tuple[Path, WhisperForConditionalGeneration]) -> dict[str, list[int]]:
    found = {
        name: greedy_whisper(whisper[1], prompt, sounds[0], COUNT)
        for name, (prompt, sounds) in PROMPTS.items()
    }
    assert found["short"] != found["whole"], "sounds matter"
    return found


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7},
        {"max_running_requests": 2, "disable_overlap_schedule": True},
        {"tensor_parallel_size": 2},
        {"page_size": 1, "speculative_algorithm": "NGRAM"},
    ],
    ids=str,
)
async def test_tokens_equal_transformers(
    options: dict[str, Any],
    whisper: tuple[Path, WhisperForConditionalGeneration],
    expected: dict[str, list[int]],
) -> None:
    context = {"context_length": 64}
    async with runtime.Engine(model_path=str(whisper[0]), **OPTIONS | context | options) as engine:
        sounds = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await sounds.ask(*prompt)
            assert answer.token_ids == expected[name], name
        assert await sounds.ask_all(PROMPTS) == expected
        assert sounds.encodings.num_encoded == 3, "each sound is encoded once"


@pytest.mark.anyio
async def test_preempted_sequences_keep_their_sounds(
    whisper: tuple[Path, WhisperForConditionalGeneration],
) -> None:
    """Long answers of which not all fit."""
    prompts, count = list(PROMPTS.values()), 40
    expected = [greedy_whisper(whisper[1], prompt, sounds[0], count) for prompt, sounds in prompts]
    own = {"context_length": 64, "max_total_tokens": 100, "schedule_conservativeness": 0.1}
    async with runtime.Engine(model_path=str(whisper[0]), **OPTIONS | own) as engine:
        sounds = Images(engine)
        assert await sounds.ask_each(prompts, max_new_tokens=count) == expected
        assert sounds.scheduler.totals.preemptions > 0


@pytest.mark.anyio
async def test_each_request_has_one_sound(whisper: tuple[Path, WhisperForConditionalGeneration]) -> None:
    async with runtime.Engine(model_path=str(whisper[0]), **OPTIONS | {"context_length": 64}) as engine:
        sounds = Images(engine)
        with pytest.raises(InvalidRequest, match="the model transcribes one sound a request"):
            await engine.generate(HEAD, **GREEDY)
        with pytest.raises(InvalidRequest, match="the model transcribes one sound a request"):
            await sounds.ask(HEAD, [SHORT, ODD])
        with pytest.raises(InvalidRequest, match="up to 1 s"):
            await sounds.ask(HEAD, [sound(1, RATE + 1)])
