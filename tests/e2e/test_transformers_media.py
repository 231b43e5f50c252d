"""Images and sounds that transformers' own code prepares and encodes (--model-impl transformers), against
transformers with its own processor on the whole prompt and its own cache: greedy tokens in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import runtime
from runtime.errors import OptionsError
from tests.e2e.image_engine import COUNT, OPTIONS, Images, Prompt
from tests.models.make_media import picture
from tests.models.make_processed import FAMILIES, GRIDS, PREFIX, SOUNDS, Processed, greedy_processed

A, B, SMALL = picture(1, 30, 60), picture(2, 90, 30), picture(3, 7, 9)
IMPL = OPTIONS | {"model_impl": "transformers"}
CHUNKS = {"chunked_prefill_size": 7, "disable_radix_cache": True}
Expected = dict[str, tuple[Prompt, list[int], int]]


def sound(seed: int, seconds: float) -> np.ndarray:
    """Noise at 16 kHz, float32."""
    return np.random.default_rng(seed).normal(0, 0.2, int(16000 * seconds)).astype(np.float32)


LONG, SHORT = sound(1, 1.7), sound(2, 0.4)


def texts(mark: str, one: np.ndarray, other: np.ndarray) -> dict[str, tuple[str, list[np.ndarray]]]:
    return {
        "one": (f"what is{mark} and this? ", [one]),
        "two": (f"{mark} what is{mark} and", [one, other]),
        "text": ("what is and this? ", []),
    }


def make(family: Processed, folder: Path, one: np.ndarray, other: np.ndarray) -> Expected:
    """Writes a model. -> prompts, and transformers' answers to them, which depend on the files"""
    model = family.make(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: Expected = {}
    for name, (text, files) in texts(family.tokens[0], one, other).items():
        if not family.least_files <= len(files) <= family.most_files:
            continue
        answer, length = greedy_processed(folder, model, text, files, COUNT)
        found[name] = ((tokenizer(text)["input_ids"], files), answer, length)
    assert (
        greedy_processed(folder, model, texts(family.tokens[0], other, one)["one"][0], [other], COUNT)[0]
        != (found["one"][1])
    ), "files matter"
    return found


async def check(folder: Path, options: dict[str, Any], expected: Expected) -> None:
    async with runtime.Engine(model_path=str(folder), **IMPL | options) as engine:
        images = Images(engine)
        for name, ((ids, files), tokens, length) in expected.items():
            answer = await images.ask(ids, files)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == (tokens, length), name
        together = await images.ask_all({name: prompt for name, (prompt, _, _) in expected.items()})
        assert together == {name: tokens for name, (_, tokens, _) in expected.items()}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ovis 2", CHUNKS, id="ovis 2"),
        pytest.param("llava-next", {}, id="llava-next", marks=pytest.mark.full),
        pytest.param("idefics 2", {}, id="idefics 2", marks=pytest.mark.full),
    ],
)
async def test_images_equal_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    await check(tmp_path, options, make(FAMILIES[name], tmp_path, A, B))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("glm-4.6v", CHUNKS, id="glm-4.6v"),
        pytest.param("glm-4.6v", {}, id="glm-4.6v, prefixes", marks=pytest.mark.full),
        pytest.param("glm-ocr", {}, id="glm-ocr", marks=pytest.mark.full),
        pytest.param("paddleocr-vl", {}, id="paddleocr-vl", marks=pytest.mark.full),
    ],
)
async def test_positions_of_rows_and_columns(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The positions that the model's own get_rope_index gives (M-RoPE)."""
    await check(tmp_path, options, make(GRIDS[name], tmp_path, A, B))


@pytest.mark.anyio
async def test_a_prompt_that_sees_itself(tmp_path: Path) -> None:
    """PaliGemma: the image and the text behind it attend to all of themselves, and answers to what is
    before."""
    expected = make(PREFIX, tmp_path, A, B)
    await check(tmp_path, {}, expected)
    await check(
        tmp_path, {"disable_radix_cache": True, "chunked_prefill_size": 96, "context_length": 96}, expected
    )


@pytest.mark.anyio
async def test_steps_have_room_for_a_prompt_that_sees_itself(tmp_path: Path) -> None:
    PREFIX.make(tmp_path)
    with pytest.raises(OptionsError, match="must be at least the 256 tokens of a prompt"):
        async with runtime.Engine(model_path=str(tmp_path), **IMPL, chunked_prefill_size=64):
            pass


@pytest.mark.anyio
async def test_sounds_equal_transformers(tmp_path: Path) -> None:
    await check(tmp_path, {}, make(SOUNDS["glm-asr"], tmp_path, LONG, SHORT))
