"""Images in requests of every HTTP API, as files that clients send: answers are those of transformers."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

import runtime
from tests.models.make_media import ROWS, greedy, make_llava, name_placeholder, picture

COUNT = 8
MARK = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}assistant: "
)
A, B = picture(1), picture(2, 60, 30)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlavaForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("llava")
    model = make_llava(folder)
    name_placeholder(folder, MARK, TEMPLATE)
    return folder, model


def png(image: np.ndarray) -> str:
    """The image as a file, in base64."""
    Image.fromarray(image).save(file := io.BytesIO(), "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(image: np.ndarray) -> str:
    return f"data:image/png;base64,{png(image)}"


def chat(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def openai_part(image: np.ndarray) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def anthropic_part(image: np.ndarray) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": png(image)}
    return {"type": "image", "source": source}


GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
OLLAMA = {"temperature": 0, "num_predict": COUNT}
NATIVE = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True, "skip_special_tokens": False}
# path, body, where the answer's text is, the text that the model sees, its images
Case = tuple[str, dict[str, Any], Callable[[Any], str], str, list[np.ndarray]]
CASES: dict[str, Case] = {
    "openai chat": (
        "/v1/chat/completions",
        {"messages": chat(text("left "), openai_part(A), text(" right "), openai_part(B))} | GREEDY,
        lambda answer: answer["choices"][0]["message"]["content"],
        "user: left <image> right <image>\nassistant: ",
        [A, B],
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": chat(anthropic_part(A), text("what?"))} | GREEDY,
        lambda answer: answer["content"][0]["text"],
        "user: <image>what?\nassistant: ",
        [A],
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "what is here", "images": [png(B)]}], "stream": False}
        | {"options": OLLAMA},
        lambda answer: answer["message"]["content"],
        "user: <image>what is here\nassistant: ",
        [B],
    ),
    "native": (
        "/generate",
        {"text": "a <image> b", "image_data": data_url(B), "sampling_params": NATIVE},
        lambda answer: answer["text"],
        "a <image> b",
        [B],
    ),
}


@pytest.mark.anyio
async def test_answers_are_those_of_transformers(llava: tuple[Path, LlavaForConditionalGeneration]) -> None:
    folder, model = llava
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"num_threads": 1, "context_length": 256, "dtype": "float32"} | {
        "served_model_name": "x"
    }
    async with (
        runtime.Engine(model_path=str(folder), **options) as engine,
        httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://test") as http,
    ):
        for path, body, read, prompt, images in CASES.values():
            answer = await http.post(
                path, json=({} if path == "/generate" else {"model": "x"}) | body, timeout=60
            )
            assert answer.status_code == 200, answer.text
            tokens = greedy(model, tokenizer.encode(prompt).ids, images, COUNT)
            assert read(answer.json()) == tokenizer.decode(tokens, skip_special_tokens=False), path
        await check_refusals(http)
        lines = (await http.get("/metrics")).text.splitlines()
        values = {
            line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("runtime_media")
        }
        assert values["runtime_media_encoded_total"] == 2, "of each image, once"
        assert values["runtime_media_kept_rows"] == 2 * ROWS
        assert values["runtime_media_reused_total"] == 3, "by the three requests after the first"


async def check_refusals(http: httpx.AsyncClient) -> None:
    """What is no image, or is not taken, is refused with its field; the next request is served."""
    broken = "data:image/png;base64," + base64.b64encode(base64.b64decode(png(A))[:200]).decode()
    first = "messages[0].content[0].image_url.url"
    for url, status, param in (
        (broken, 400, first),
        ("http://127.0.0.1:9/a.png", 400, first),
        ("file:///etc/passwd", 403, first),
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = await http.post("/v1/chat/completions", json={"model": "x", "messages": chat(part)} | GREEDY)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    for prompt in ("two <image><image>", "none"):
        body = {"text": prompt, "image_data": data_url(A), "sampling_params": NATIVE}
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 400, (prompt, answer.text)
