"""Images, videos and sounds of Qwen2.5-Omni and Qwen3-Omni, and videos with their sounds, against
transformers: greedy tokens in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import runtime
from runtime.errors import InvalidRequest
from runtime.models.config.model_config import read_config
from tests.e2e.image_engine import COUNT, OPTIONS, Images, Prompt
from tests.models.make_audio import sound
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, picture
from tests.models.make_omni import (
    AUDIO_END,
    AUDIO_PLACEHOLDER,
    AUDIO_START,
    END,
    START,
    Omni,
    greedy_omni,
    make_omni,
)

TEXT, MORE = list(b"what is"), list(b" and this? ")
IMAGE, SEEN, HEARD = [START, PLACEHOLDER, END], [START, VIDEO_PLACEHOLDER, END], AUDIO_PLACEHOLDER


def video(seed: int, frames: int, height: int, width: int) -> np.ndarray:
    """Random frames, uint8 [frames, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


A, FILM, ODD = picture(1, 40, 60), video(2, 6, 32, 40), video(3, 3, 24, 48)
LONG, SHORT, SECOND = sound(4, 40_077), sound(5, 7_000), sound(6, 22_222)
NEXT = [AUDIO_START, HEARD, AUDIO_END]
# prompts with one placeholder a file, and the files
PROMPTS: dict[str, Prompt] = {
    "one sound": ([*TEXT, *NEXT, *MORE], [LONG]),
    "a short sound": ([*NEXT, *MORE], [SHORT]),
    "two sounds": ([*NEXT, *TEXT, *NEXT], [SECOND, LONG]),
    "all kinds": ([*SEEN, *TEXT, *NEXT, *MORE, *IMAGE, *TEXT], [ODD, SECOND, A]),
    "a video with its sound": ([*TEXT, *SEEN, *MORE], [(FILM, LONG)]),
    "a longer video": ([*SEEN, *MORE, *IMAGE, *TEXT], [(FILM, SECOND), A]),
    "a longer sound": ([*TEXT, *SEEN, *MORE], [(ODD, LONG)]),
    "text alone": ([*TEXT, *MORE], []),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module", params=["2.5", "3"])
def omni(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Omni, Expected]:
    folder = tmp_path_factory.mktemp("omni")
    model = make_omni(folder, request.param)
    found = {name: greedy_omni(model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_omni(model, PROMPTS["one sound"][0], [sound(9, 40_077)], COUNT)
    assert other[0] != found["one sound"][0], "sounds matter"
    return folder, model, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 23, "page_size": 1},
        {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True},
    ],
    ids=str,
)
async def test_tokens_equal_transformers(options: dict[str, Any], omni: tuple[Path, Omni, Expected]) -> None:
    folder, _, expected = omni
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        files = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await files.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await files.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        assert files.encodings.num_encoded == 6, "each file is encoded once"


@pytest.mark.anyio
async def test_a_published_checkpoint_speaks_too(omni: tuple[Path, Omni, Expected], tmp_path: Path) -> None:
    """Its thinker is in a part of config.json, and below a prefix of names of tensors."""
    folder, model, expected = omni
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    fields = json.loads((folder / "config.json").read_text())
    name = fields["architectures"][0].replace("Thinker", "")
    whole = {"architectures": [name], "thinker_config": fields, "talker_config": {}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {f"thinker.{name}": one for name, one in load_file(folder / "model.safetensors").items()}
    tensors["talker.codec_head.weight"] = next(iter(tensors.values())).clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_config(tmp_path).media == read_config(folder).media
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS) as engine:
        name = "all kinds"
        assert (await Images(engine).ask(*PROMPTS[name])).token_ids == expected[name][0]


@pytest.mark.anyio
async def test_sounds_that_are_too_short_are_refused(omni: tuple[Path, Omni, Expected]) -> None:
    async with runtime.Engine(model_path=str(omni[0]), **OPTIONS) as engine:
        with pytest.raises(InvalidRequest, match="media: 100 samples are too short"):
            await Images(engine).ask(NEXT, [sound(1, 100)])
