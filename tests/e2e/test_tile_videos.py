"""Videos of SmolVLM, whose frames are tiles with their times between them, against transformers with its own
processor: greedy tokens in float32."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import runtime
from runtime.errors import InvalidRequest
from runtime.models.config.model_config import read_config
from runtime.models.config.siglip_config import SiglipEncoder
from runtime.text.smolvlm_videos import read_frames
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.media.files import video as make_video
from tests.models.make_images import greedy_of
from tests.models.make_media import FRAME_TIMES_S, PLACEHOLDER, VIDEO_PLACEHOLDER, picture
from tests.models.make_tiles import EDGE, SmolVlm

RATE = 24  # frames a second that a video without a rate has
IMAGE = picture(1, 30, 60)
LARGE, SMALL = (
    np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    for seed, shape in ((2, (3, 30, 60, 3)), (3, (2, 21, 7, 3)))
)
# prompts whose <video> and <image> stand for the files
PROMPTS: dict[str, tuple[str, list[np.ndarray]]] = {
    "one video": ("what is <video>and this? ", [LARGE]),
    "two videos": ("<video><video>\n what?", [SMALL, LARGE]),
    "beside an image": ("<image>and <video>", [IMAGE, SMALL]),
}
ROOM: dict[str, Any] = {"context_length": 512}


def expected_of(
    model: PreTrainedModel, family: SmolVlm, text: str, files: list[np.ndarray]
) -> tuple[list[int], int]:
    """Transformers' answer, and how many tokens the prompt has."""
    pixels: list[torch.Tensor] = []
    for file in files:
        if file.ndim == 3:
            given, (shown,) = family.processed([file])
            pixels.append(given["pixel_values"])
        else:
            step = int(FRAME_TIMES_S * RATE)
            values, shown = family.prepare_video(file, RATE, [index * step for index in range(len(file))])
            pixels.append(values)
        mark = "<image>" if file.ndim == 3 else "<video>"
        text = text.replace(mark, shown.replace("<image>", "<row>"), 1)
    ids = family.tokenizer.encode(text.replace("<row>", "<image>")).ids
    return greedy_of(model, ids, {"pixel_values": torch.cat(pixels, 1)}, COUNT), len(ids)


def ids_of(family: SmolVlm, text: str) -> list[int]:
    ids: list[int] = family.tokenizer.encode(text).ids
    return ids


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7}], ids=str)
async def test_tokens_equal_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    family = SmolVlm()
    family.seed = 7  # answers depend on the order of frames, and none has a placeholder
    model = family.make(tmp_path)
    expected = {name: expected_of(model, family, *prompt) for name, prompt in PROMPTS.items()}
    backwards = expected_of(model, family, PROMPTS["one video"][0], [LARGE[::-1].copy()])
    assert backwards != expected["one video"], "the order of frames matters"
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS | ROOM | options) as engine:
        videos = Images(engine)
        for name, (text, files) in PROMPTS.items():
            answer = await videos.ask(ids_of(family, text), files)
            assert answer.finish is not None
            assert (answer.token_ids, answer.finish.prompt_tokens) == expected[name], name
        assert videos.encodings.num_encoded == 3 + 2 + 1, "each frame is encoded once"


@pytest.mark.anyio
@pytest.mark.parametrize("mark", ["<video>", "<|reserved_special_token_0|>"])
async def test_files_of_requests_become_videos(mark: str, tmp_path: Path) -> None:
    """An MP4 in a chat, with a template that knows images alone, as published ones do."""
    family = SmolVlm()
    family.marks = {"<image>": PLACEHOLDER, "<fake_token_around_image>": 253, mark: VIDEO_PLACEHOLDER}
    family.make(tmp_path)
    template = (
        "User: {% for part in messages[0].content %}{% if part.type == 'image' %}<image>"
        "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    )
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    url = f"data:video/mp4;base64,{base64.b64encode(make_video('mp4', 'mpeg4')).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "what? "}]
    body = {"model": "x", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    # 30 frames, 10 a second, of which 6 are shown
    text = "User: You are provided the following series of six frames from a 0:00:03 [H:MM:SS] video.\n"
    for second in (0, 0, 1, 1, 2, 2):
        text += f"\nFrame from 00:0{second}:<fake_token_around_image><global-img>"
        text += "<image>" * 4 + "<fake_token_around_image>"
    text += "\n\nwhat? "
    async with (
        runtime.Engine(model_path=str(tmp_path), served_model_name="x", **OPTIONS | ROOM) as engine,
        httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://test") as http,
    ):
        answer = await http.post("/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(ids_of(family, text))


@pytest.mark.anyio
async def test_a_tokenizer_without_a_token_for_videos(tmp_path: Path) -> None:
    family = SmolVlm()
    family.marks = {"<image>": PLACEHOLDER, "<fake_token_around_image>": 253}
    family.make(tmp_path)
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS) as engine:
        with pytest.raises(InvalidRequest, match="this model takes images, and no videos"):
            await Images(engine).ask([*b"what is"], [SMALL])


@pytest.mark.parametrize(
    ("name", "fields", "size"),
    [
        ("preprocessor_config.json", {"size": {"longest_edge": 24}}, 24),
        ("preprocessor_config.json", {"video_sampling": {"video_size": {"longest_edge": 18}}}, 18),
        ("video_preprocessor_config.json", {"size": {"longest_edge": 9000}}, 4096),
    ],
)
def test_the_files_that_say_how_frames_are_made(
    name: str, fields: dict[str, Any], size: int, tmp_path: Path
) -> None:
    SmolVlm().make(tmp_path)
    (tmp_path / name).write_text(json.dumps({"max_image_size": {"longest_edge": EDGE}} | fields))
    encoder = read_config(tmp_path).media
    assert isinstance(encoder, SiglipEncoder)
    frames = read_frames(tmp_path, encoder)
    assert (frames.size.longest_edge, frames.edge) == (size, EDGE)
