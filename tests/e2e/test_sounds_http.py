"""Sounds in requests of HTTP APIs, as files that clients send: answers are those of transformers."""

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from tokenizers import Tokenizer
from transformers import Qwen2AudioForConditionalGeneration

import runtime
from tests.models.make_audio import RATE, greedy_sounds, make_qwen_audio, sound
from tests.models.make_media import name_placeholder

COUNT = 8
MARK = "<|AUDIO|>"
# asks for the field, not for the type of a part, as published templates do
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if 'audio' in part %}<|AUDIO|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}assistant: "
)
A, B = sound(1, 9000), sound(2, 16000)
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
NATIVE = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2AudioForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("audio")
    model = make_qwen_audio(folder)
    name_placeholder(folder, MARK, TEMPLATE)
    return folder, model


def file_of(samples: np.ndarray, rate: int = RATE, kind: str = "WAV") -> str:
    """The sound as a file of exact samples where the kind has such, in base64."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype={"WAV": "FLOAT"}.get(kind))
    return base64.b64encode(file.getvalue()).decode()


def chat(*content: dict[str, Any]) -> dict[str, Any]:
    return {"model": "x", "messages": [{"role": "user", "content": list(content)}]} | GREEDY


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def input_audio(data: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


@pytest.mark.anyio
async def test_answers_are_those_of_transformers(
    audio: tuple[Path, Qwen2AudioForConditionalGeneration],
) -> None:
    folder, model = audio
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"num_threads": 1, "context_length": 256, "dtype": "float32"} | {
        "served_model_name": "x"
    }
    flac = np.round(A * 32768) / 32768  # 16 bits, as FLAC has them
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/flac;base64,{file_of(flac, kind='FLAC')}"}}
    async with (
        runtime.Engine(model_path=str(folder), **options) as engine,
        httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://test") as http,
    ):

        def expected(prompt: str, *sounds: np.ndarray) -> str:
            tokens, _ = greedy_sounds(model, tokenizer.encode(prompt).ids, sounds, COUNT)
            return tokenizer.decode(tokens, skip_special_tokens=False)

        async def ask(path: str, body: dict[str, Any]) -> Any:
            answer = await http.post(path, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()

        body = chat(text("left "), input_audio(file_of(A)), text(" right "), input_audio(file_of(B)))
        found = (await ask("/v1/chat/completions", body))["choices"][0]["message"]["content"]
        assert found == expected("user: left <|AUDIO|> right <|AUDIO|>\nassistant: ", A, B)
        found = (await ask("/v1/chat/completions", chat(url)))["choices"][0]["message"]["content"]
        assert found == expected("user: <|AUDIO|>\nassistant: ", flac.astype(np.float32))
        body = {"text": "a <|AUDIO|> b", "audio_data": file_of(B), "sampling_params": NATIVE}
        assert (await ask("/generate", body))["text"] == expected("a <|AUDIO|> b", B)
        # other rates are brought to that of the model, and channels are averaged
        stereo = np.repeat(sound(3, 22050)[:, None], 2, axis=1)
        body = {"text": "<|AUDIO|>", "audio_data": file_of(stereo, 44100), "sampling_params": NATIVE}
        assert (await ask("/generate", body))["meta_info"]["prompt_tokens"] == 12, "of half a second"
        assert (await http.get("/model_info")).json()["has_audio_understanding"]
        for data, words in ((file_of(sound(4, RATE + 9)), "lasts over 1 s"), ("AAAA", "is none of WAV")):
            answer = await http.post("/v1/chat/completions", json=chat(input_audio(data)))
            error = answer.json()["error"]
            assert answer.status_code == 400 and words in error["message"], error
            assert error["param"] == "messages[0].content[0].input_audio.data"
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        answer = await http.post("/v1/chat/completions", json=chat(image))
        assert answer.status_code == 400 and "send text, sounds alone" in answer.text
