"""Images and videos of Qwen3-VL and Qwen3.5, dense and with experts, against transformers: greedy tokens in
float32."""

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import runtime
from runtime.errors import OptionsError
from tests.e2e.image_engine import COUNT, GROUPS, OPTIONS, Images
from tests.media.files import video as make_video
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, name_placeholder, picture
from tests.models.make_qwen3_vl import END, START, greedy_qwen3_vl, make_qwen3_vl

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 40, 60), picture(2, 90, 30), picture(3, 7, 9)


def video(seed: int, frames: int, height: int, width: int) -> np.ndarray:
    """Random frames, uint8 [frames, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


FILM, ODD = video(4, 6, 32, 40), video(5, 3, 24, 48)
# prompts with one placeholder a file, and the files
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "three images": ([PLACEHOLDER, *TEXT, START, PLACEHOLDER, END, *MORE, PLACEHOLDER, *TEXT], [A, B, SMALL]),
    "the last token": ([*MORE, PLACEHOLDER], [B]),
    "text alone": ([*TEXT, *MORE], []),
    "one video": ([*TEXT, VIDEO_PLACEHOLDER, *MORE], [FILM]),
    "an odd number of frames": ([VIDEO_PLACEHOLDER, *MORE], [ODD]),
    "both kinds": ([VIDEO_PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, VIDEO_PLACEHOLDER], [ODD, A, FILM]),
}
Expected = dict[str, tuple[list[int], int]]  # of each prompt its answer, and how many tokens it has


@pytest.fixture(scope="module")
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("qwen")
    model = make_qwen3_vl(folder, request.param)
    found = {name: greedy_qwen3_vl(folder, model, *prompt, COUNT) for name, prompt in PROMPTS.items()}
    other = greedy_qwen3_vl(folder, model, PROMPTS["one image"][0], [B], COUNT)
    assert other[0] != found["one image"][0], "images matter"
    return folder, found


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("qwen", "options"),
    [
        ("dense", {"chunked_prefill_size": 7, "disable_radix_cache": True}),
        ("dense", {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True, "chunked_prefill_size": 20}),
        ("dense", {"pipeline_parallel_size": 2, "chunked_prefill_size": 12}),
        ("dense", {"page_size": 1, "speculative_algorithm": "NGRAM"}),
        ("moe", {"chunked_prefill_size": 12}),
        ("moe", {"tensor_parallel_size": 2, "moe_a2a_backend": "deepep"}),
        ("3.5", {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True, "chunked_prefill_size": 12}),
        ("3.5 moe", {"pipeline_parallel_size": 2, "chunked_prefill_size": 20}),
        ("3.5 moe", GROUPS | {"chunked_prefill_size": 12}),
        ("moe", GROUPS | {"moe_a2a_backend": "deepep"}),
    ],
    indirect=["qwen"],
    ids=str,
)
async def test_tokens_equal_transformers(options: dict[str, Any], qwen: tuple[Path, Expected]) -> None:
    folder, expected = qwen
    async with runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine:
        files = Images(engine)
        for name, prompt in PROMPTS.items():
            answer = await files.ask(*prompt)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert await files.ask_all(PROMPTS) == {name: tokens for name, (tokens, _) in expected.items()}
        counts = files.num_encoded
        assert counts == [5] if len(counts) == 1 else max(counts) <= 5, "a replica encodes each file once"


@pytest.mark.anyio
@pytest.mark.parametrize("qwen", ["dense"], indirect=True)
async def test_equal_files_share_prefixes(qwen: tuple[Path, Expected]) -> None:
    """Also of videos, whose tokens have text between them; and marks around a placeholder are the video's."""
    folder, expected = qwen
    async with runtime.Engine(model_path=str(folder), **OPTIONS) as engine:
        files, cached = Images(engine), []
        for name, other in (("one image", picture(9, 40, 60)), ("one video", video(9, 6, 32, 40))):
            prompt, (file,) = PROMPTS[name]
            tokens, length = expected[name]
            for one in (file, other, file.copy()):
                answer = await files.ask(prompt, [one])
                assert answer.finish is not None
                cached.append(answer.finish.cached_tokens)
                assert (answer.token_ids == tokens) == (one is not other)
            assert cached[-1] == (length - 1) // 4 * 4 and cached[-2] < length // 2
        marked = [*TEXT, START, VIDEO_PLACEHOLDER, END, *MORE]
        assert (await files.ask(marked, [FILM])).token_ids == expected["one video"][0]


@pytest.mark.anyio
async def test_files_of_requests_become_videos_with_their_times(tmp_path: Path) -> None:
    """An MP4 and a PNG in a chat, whose template writes marks around both."""
    make_qwen3_vl(tmp_path)
    template = (
        "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
        "<|start|><|{{ part.type }}|><|end|>{% endif %}{% endfor %}"
    )
    for name, id in (("image", PLACEHOLDER), ("video", VIDEO_PLACEHOLDER), ("start", START), ("end", END)):
        name_placeholder(tmp_path, f"<|{name}|>", template, id)
    image = io.BytesIO()
    Image.fromarray(A).save(image, "PNG")
    files = {"video": ("video/mp4", make_video("mp4", "mpeg4")), "image": ("image/png", image.getvalue())}
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what? "}]
    for kind, (type, data) in files.items():
        url = f"data:{type};base64,{base64.b64encode(data).decode()}"
        parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
    body = {"model": "x", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    async with (
        runtime.Engine(model_path=str(tmp_path), served_model_name="x", **OPTIONS) as engine,
        httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://test") as http,
    ):
        answer = await http.post("/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        # 3 s at 2 frames a second: 3 moments, of 4 x 5 tokens (8,192 pixels in all), with times and marks
        moments = 3 * (len("<0.2 seconds>") + 1 + 4 * 5 + 1)
        assert answer.json()["usage"]["prompt_tokens"] == len("what? ") + moments + 2 + 5 * 8


@pytest.mark.anyio
@pytest.mark.parametrize("qwen", ["dense"], indirect=True)
async def test_the_first_stage_has_the_layers_with_features(qwen: tuple[Path, Expected]) -> None:
    with pytest.raises(OptionsError, match="must have the model's first 2 layers"):
        async with runtime.Engine(model_path=str(qwen[0]), pipeline_parallel_size=4, **OPTIONS):
            pass
