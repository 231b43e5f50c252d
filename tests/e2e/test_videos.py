"""Videos, whose tokens have positions of time, row and column (Qwen2-VL, Qwen2.5-VL), against transformers:
greedy tokens in float32."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import runtime
from runtime.errors import InvalidRequest
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.media.files import video as make_video
from tests.models.make_media import (
    PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    greedy_qwen_vl,
    make_qwen_vl,
    name_placeholder,
    picture,
)

TEXT, MORE = list(b"what is"), list(b" and this? ")


def video(seed: int, frames: int, height: int, width: int) -> np.ndarray:
    """Random frames, uint8 [frames, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


IMAGE, A, B = picture(1, 40, 60), video(2, 6, 32, 40), video(3, 3, 24, 48)
# prompts with one placeholder a file, and the files
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one video": ([*TEXT, VIDEO_PLACEHOLDER, *MORE], [A]),
    "an odd number of frames": ([VIDEO_PLACEHOLDER, *MORE], [B]),
    "one frame": ([*TEXT, VIDEO_PLACEHOLDER, *TEXT], [A[:1]]),
    "among images": ([VIDEO_PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, VIDEO_PLACEHOLDER, *TEXT], [A, IMAGE, B]),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module", params=["2", "2.5"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("qwen")
    model = make_qwen_vl(folder, request.param)
    found = {name: greedy_qwen_vl(model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    reversed_frames = greedy_qwen_vl(model, PROMPTS["one video"][0], [A[::-1].copy()], COUNT)
    assert reversed_frames[0] != found["one video"][0], "the order of frames matters"
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options", [{}, {"chunked_prefill_size": 7}, {"tensor_parallel_size": 2}, {"page_size": 1}], ids=str
)
async def test_tokens_equal_transformers(options: dict[str, Any], qwen: tuple[Path, Expected]) -> None:
    folder, expected = qwen
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        videos = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await videos.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        # files of another kind may be named first: each placeholder takes the next one of its own
        prompt, (first, image, last) = PROMPTS["among images"]
        answer = await videos.ask(prompt, [image, first, last])
        assert answer.token_ids == expected["among images"][0]
        assert videos.encodings.num_encoded == 4, "each file is encoded once"


@pytest.mark.anyio
async def test_placeholders_are_counted_by_kind(qwen: tuple[Path, Expected]) -> None:
    async with runtime.Engine(model_path=str(qwen[0]), **OPTIONS) as engine:
        with pytest.raises(InvalidRequest, match="the prompt has 1 placeholders for 0 images"):
            await Images(engine).ask([PLACEHOLDER, *TEXT], [A])
        with pytest.raises(InvalidRequest, match="a video of 900 x 1|too narrow"):
            await Images(engine).ask([VIDEO_PLACEHOLDER, *TEXT], [video(1, 2, 1, 900)])


@pytest.mark.anyio
async def test_files_of_requests_become_videos(qwen: tuple[Path, Expected]) -> None:
    """An MP4 in a chat: its sampled frames, at the times at which they are shown."""
    folder, _ = qwen
    template = (
        "{% for part in messages[0].content %}{% if part.type == 'video' %}<|video|>{% else %}"
        "{{ part.text }}{% endif %}{% endfor %}"
    )
    name_placeholder(folder, "<|video|>", template, VIDEO_PLACEHOLDER)
    url = f"data:video/mp4;base64,{base64.b64encode(make_video('mp4', 'mpeg4')).decode()}"
    parts = [{"type": "text", "text": "what? "}, {"type": "video_url", "video_url": {"url": url}}]
    body = {"model": "x", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    async with (
        runtime.Engine(model_path=str(folder), served_model_name="x", **OPTIONS) as engine,
        httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://test") as http,
    ):
        answer = await http.post("/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        # 3 s at 2 frames a second: 3 moments, of 5 x 7 tokens (2,560 pixels of 64 x 48 may stay)
        assert answer.json()["usage"]["prompt_tokens"] == len("what? ") + 3 * 5 * 7
