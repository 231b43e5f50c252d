"""Images, videos and sounds in every place of every API, sent by the clients of those APIs as real files:
answers are those of transformers, and usage says what the files took."""

import io
import os
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
import soundfile
from PIL import Image
from tokenizers import Tokenizer

import runtime
from runtime.media.decode import decode_file
from runtime.media.decode_messages import DecodeRequest
from runtime.media.settings import DecodeLimits
from runtime.messages.media import MediaKind
from tests.http.serving import serving
from tests.media.files import film, video
from tests.media.loading import response, web
from tests.metrics.read import sample
from tests.models.make_audio import RATE, sound
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, File, name_placeholder, picture
from tests.models.make_omni import AUDIO_PLACEHOLDER, END, START, Omni, greedy_omni, make_omni

pytestmark = pytest.mark.anyio

COUNT = 8
KINDS = ("image", "video", "audio")
IMAGE, VIDEO = "<|bos|><|image|><|eos|>", "<|bos|><|video|><|eos|>"
AUDIO = "<|audio_start|><|audio|><|audio_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    + IMAGE
    + "{% elif part.type == "
    "'video' %}" + VIDEO + "{% elif part.type == 'audio' %}" + AUDIO + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}assistant: "
)
TOKENS = {
    PLACEHOLDER: "<|image|>",
    VIDEO_PLACEHOLDER: "<|video|>",
    AUDIO_PLACEHOLDER: "<|audio|>",
    START: "<|bos|>",
    END: "<|eos|>",
}
SEEN, HEARD = picture(1, 40, 60), sound(2, 9000)
FRAMES = np.random.default_rng(3).integers(0, 256, (6, 32, 40, 3), dtype=np.uint8)
FILM = film(FRAMES, sound(4, 30_000))
EXACT: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False}
GREEDY: dict[str, Any] = {"model": "x", "temperature": 0, "max_tokens": COUNT, "extra_body": EXACT}
NATIVE = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True, "skip_special_tokens": False}


def decoded(kind: MediaKind, **limits: Any) -> np.ndarray:
    """What FILM shows, or sounds like."""
    fd = os.memfd_create("film")
    os.write(fd, FILM)
    return decode_file(fd, DecodeRequest(kind, None, 10.0, DecodeLimits(**limits)))[1]


def png() -> bytes:
    Image.fromarray(SEEN).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def wav() -> bytes:
    soundfile.write(file := io.BytesIO(), HEARD, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


PNG, WAV = png(), wav()  # made once: WAV files say when they were made


def text64(data: bytes) -> str:
    return b64encode(data).decode()


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{text64(data)}"


OF_IMAGE = {"type": "image_url", "image_url": {"url": data_url(PNG, "image/png"), "detail": "auto"}}
OF_VIDEO = {"type": "video_url", "video_url": {"url": data_url(FILM, "video/mp4")}}
OF_SOUND = {"type": "input_audio", "input_audio": {"data": text64(WAV), "format": "wav"}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


class Bench:
    """A server of a tiny Omni, and what transformers generates of the same prompts."""

    def __init__(self, url: str, model: Omni, tokenizer: Tokenizer) -> None:
        self.url, self._model, self._tokenizer = url, model, tokenizer
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)

    def expected(self, prompt: str, *files: File) -> str:
        tokens, _ = greedy_omni(self._model, self._tokenizer.encode(prompt).ids, files, COUNT)
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    async def chat(self, *parts: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
        """-> the answer's text and the details of its prompt's tokens"""
        messages: Any = [{"role": "user", "content": list(parts)}]
        asked = GREEDY | {"extra_body": EXACT | more}
        answer = await self.client.chat.completions.create(messages=messages, **asked)
        return answer.choices[0].message.content, answer.usage.prompt_tokens_details.to_dict()


@asynccontextmanager
async def serving_omni(folder: Path) -> AsyncIterator[Bench]:
    model = make_omni(folder, "2.5")
    for id, name in TOKENS.items():
        name_placeholder(folder, name, TEMPLATE, id)
    options: dict[str, Any] = {"num_threads": 1, "context_length": 512, "dtype": "float32", "page_size": 1}
    options |= {"served_model_name": "x", "allowed_media_domains": ("127.0.0.1",)}
    async with (
        runtime.Engine(model_path=str(folder), **options) as engine,
        serving(engine.asgi()) as (host, port),
    ):
        bench = Bench(f"http://{host}:{port}", model, Tokenizer.from_file(str(folder / "tokenizer.json")))
        async with bench.client:
            yield bench


async def test_every_place_of_every_api(tmp_path: Path) -> None:
    async with serving_omni(tmp_path) as bench:
        await check_chats(bench)
        await check_videos_with_sound(bench)
        await check_responses(bench)
        await check_messages(bench)
        await check_ollama(bench)
        await check_native(bench)
        await check_metrics(bench)


async def check_chats(bench: Bench) -> None:
    parts = text("look "), OF_IMAGE, OF_VIDEO, text(" hear "), OF_SOUND
    prompt = f"user: look {IMAGE}{VIDEO} hear {AUDIO}\nassistant: "
    answer, first = await bench.chat(*parts)
    assert answer == bench.expected(prompt, SEEN, decoded(MediaKind.VIDEO), HEARD)
    assert min(first["image_tokens"], first["video_tokens"], first["audio_tokens"]) > 0
    assert first["cached_media"] == 0 and first["encode_seconds"] > 0
    assert first["cached_tokens_details"] == {"image_tokens": 0, "video_tokens": 0, "audio_tokens": 0}
    again, second = await bench.chat(*parts)
    kinds = ("image_tokens", "video_tokens", "audio_tokens")
    assert again == answer and [second[kind] for kind in kinds] == [first[kind] for kind in kinds]
    assert (second["cached_media"], second["encode_seconds"]) == (3, 0)
    assert second["cached_tokens_details"] == {kind: first[kind] for kind in kinds}
    messages: Any = [{"role": "user", "content": list(parts)}]
    asked = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await bench.client.chat.completions.create(messages=messages, **asked)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    assert chunks[-1].usage.prompt_tokens_details.to_dict() == second


async def check_videos_with_sound(bench: Bench) -> None:
    sounds = decoded(MediaKind.AUDIO, sound_rate=RATE)
    expected = bench.expected(f"user: {VIDEO}\nassistant: ", (decoded(MediaKind.VIDEO), sounds))
    for more in ({"use_audio_in_video": True}, {"mm_processor_kwargs": {"use_audio_in_video": True}}):
        answer, details = await bench.chat(OF_VIDEO, **more)
        assert answer == expected and details["video_tokens"] and details["audio_tokens"]
    silent, _ = await bench.chat(OF_VIDEO)
    assert silent == bench.expected(f"user: {VIDEO}\nassistant: ", decoded(MediaKind.VIDEO)) != expected
    silent_film = {"type": "video_url", "video_url": {"url": data_url(video("mp4", "mpeg4"), "video/mp4")}}
    with pytest.raises(openai.BadRequestError, match="video_url.url: the file has no sound"):
        await bench.chat(silent_film, use_audio_in_video=True)


async def check_responses(bench: Bench) -> None:
    """`input_image`, and images as `input_file`, by data and by address."""
    asked = []

    async def answer(path: str, stream: Any) -> None:
        asked.append(path)
        await stream.send(response(PNG))

    async with web(answer) as url:
        content: Any = [
            {"type": "input_text", "text": "what? "},
            {"type": "input_image", "image_url": data_url(PNG, "image/png"), "detail": "auto"},
            {"type": "input_file", "filename": "a.png", "file_data": data_url(PNG, "image/png")},
            {"type": "input_file", "file_url": f"{url}/a.png"},
        ]
        found = await bench.client.responses.create(
            model="x",
            input=[{"role": "user", "content": content}],
            temperature=0,
            max_output_tokens=COUNT,
            extra_body=EXACT,
        )
    expected = bench.expected(f"user: what? {IMAGE * 3}\nassistant: ", SEEN, SEEN, SEEN)
    assert found.output_text == expected and asked == ["/a.png"]
    details = found.usage.input_tokens_details.to_dict()
    assert details["image_tokens"] % 3 == 0 and details["cached_media"] == 3, "one encoding, made before"


async def check_messages(bench: Bench) -> None:
    picture: Any = {"type": "base64", "media_type": "image/png", "data": text64(PNG)}
    content: Any = [{"type": "image", "source": picture}, {"type": "text", "text": "what?"}]
    async with anthropic.AsyncAnthropic(base_url=bench.url, api_key="x", max_retries=0) as client:
        asked = {"model": "x", "max_tokens": COUNT, "messages": [{"role": "user", "content": content}]}
        more: dict[str, Any] = {"extra_body": {"temperature": 0, "ignore_eos": True}}
        found = await client.messages.create(**asked, **more)
        async with client.messages.stream(**asked, **more) as stream:
            (usage,) = [event.usage async for event in stream if event.type == "message_delta"]
            streamed = await stream.get_final_message()
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source"):
            picture["data"] = text64(PNG[:100])
            await client.messages.create(**asked, **more)
    expected = bench.expected(f"user: {IMAGE}what?\nassistant: ", SEEN)
    assert found.content[0].text == streamed.content[0].text == expected
    details = found.usage.model_extra["input_tokens_details"]
    assert details["image_tokens"] > 0 and details["cached_media"] == 1, details
    assert usage.model_extra["input_tokens_details"] == details


async def check_ollama(bench: Bench) -> None:
    message = {"role": "user", "content": "what?", "images": [PNG]}
    options = {"temperature": 0, "num_predict": COUNT}
    async with ollama.AsyncClient(host=bench.url) as client:
        answer = await client.chat(model="x", messages=[message], options=options)
    expected = bench.expected(f"user: {IMAGE}what?\nassistant: ", SEEN)
    assert answer.message.content == expected
    async with httpx.AsyncClient(base_url=bench.url, timeout=60) as http:
        body = {"model": "x", "prompt": "what?", "images": [text64(PNG)], "stream": False}
        found = (await http.post("/api/generate", json=body | {"options": options})).json()
    assert found["response"] == expected and found["prompt_eval_details"]["image_tokens"] > 0


async def check_native(bench: Bench) -> None:
    """Each field by itself, and all of them with one prompt."""
    given = {"image_data": text64(PNG), "video_data": data_url(FILM, "video/mp4"), "audio_data": text64(WAV)}
    marks = {"image_data": IMAGE, "video_data": VIDEO, "audio_data": AUDIO}
    files = {"image_data": SEEN, "video_data": decoded(MediaKind.VIDEO), "audio_data": HEARD}
    async with httpx.AsyncClient(base_url=bench.url, timeout=60) as http:
        for names in (("image_data",), ("video_data",), ("audio_data",), tuple(given)):
            prompt = "what " + " and ".join(marks[name] for name in names)
            body = {"text": prompt, "sampling_params": NATIVE} | {name: given[name] for name in names}
            found = (await http.post("/generate", json=body)).json()
            assert found["text"] == bench.expected(prompt, *[files[name] for name in names]), names
            kinds = {name.replace("data", "tokens") for name in names}
            assert {
                name for name in found["meta_info"] if name.split("_")[0] in ("image", "video", "audio")
            } == (kinds)
            assert found["meta_info"]["cached_media"] == len(names), "made for the chats"


async def check_metrics(bench: Bench) -> None:
    async with httpx.AsyncClient(base_url=bench.url, timeout=60) as http:
        page = (await http.get("/metrics")).content
    names = (
        *("encoded_total", "known_total"),
        *(f"{name}_seconds_count" for name in ("encode", "decode", "fetch")),
    )
    encoded, known, encodes, decodes, fetches = (sample(page, f"runtime_media_{name}") for name in names)
    assert encoded == 4, "three files, and the sound of the video, once each"
    assert known > 3 and encodes >= 2 and 0 < sample(page, "runtime_media_encode_seconds_sum") < 60
    files = [sample(page, f'runtime_media_files_total{{kind="{kind}"}}') for kind in KINDS]
    assert decodes == fetches == sum(files)
    assert all(sample(page, f'runtime_media_requests_total{{kind="{kind}"}}') > 1 for kind in KINDS)
    assert sample(page, 'runtime_media_bytes_total{kind="image"}') > len(PNG)
