"""Embeddings of conversations with images and videos (Qwen3-VL-Embedding, GME), against transformers."""

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

import runtime
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, name_placeholder, picture
from tests.models.make_qwen3_vl import END, START, Qwen3Vl, make_qwen3_vl, vector_qwen3_vl

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|start|><|{{ part.type }}|><|end|>{% endif %}{% endfor %}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
A, B = picture(1, 40, 60), picture(2, 90, 30)
OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "dtype": "float32",
    "served_model_name": "x",
    "is_embedding": True,
    "context_length": 256,
    "page_size": 4,
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3Vl]:
    folder = tmp_path_factory.mktemp("embedder")
    model = make_qwen3_vl(folder)
    for name, id in (("image", PLACEHOLDER), ("video", VIDEO_PLACEHOLDER), ("start", START), ("end", END)):
        name_placeholder(folder, f"<|{name}|>", TEMPLATE, id)
    return folder, model


def data_url(image: np.ndarray) -> str:
    Image.fromarray(image).save(file := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{"chunked_prefill_size": 12}, {"tensor_parallel_size": 2}], ids=str)
async def test_vectors_are_those_of_transformers(
    options: dict[str, Any], embedder: tuple[Path, Qwen3Vl]
) -> None:
    folder, model = embedder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def expected(prompt: str, *images: np.ndarray) -> np.ndarray:
        return vector_qwen3_vl(folder, model, tokenizer.encode(prompt).ids, images)

    async with (
        runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine,
        httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://test") as http,
    ):

        async def vectors(**body: Any) -> np.ndarray:
            body = {"model": "x", "normalize": True} | body
            answer = await http.post("/v1/embeddings", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return np.array([one["embedding"] for one in answer.json()["data"]])

        parts = [
            {"type": "image_url", "image_url": {"url": data_url(A)}},
            {"type": "text", "text": " or "},
            {"type": "image_url", "image_url": {"url": data_url(B)}},
        ]
        found = await vectors(
            messages=[{"role": "system", "content": "Say."}, {"role": "user", "content": parts}]
        )
        mark = "<|start|><|image|><|end|>"
        both = expected(f"system: Say.;user: {mark} or {mark};assistant: ", A, B)
        np.testing.assert_allclose(found, [both], atol=2e-6)
        assert np.abs(both - expected(f"system: Say.;user: {mark} or {mark};assistant: ", B, A)).max() > 1e-3
        items = [{"text": "a"}, {"image": data_url(B)}, {"text": "a", "image": data_url(A)}]
        found = await vectors(input=items)
        prompts = [("a",), (mark, B), (f"{mark}a", A)]
        np.testing.assert_allclose(
            found, [expected(f"user: {text};assistant: ", *images) for text, *images in prompts], atol=2e-6
        )
        found = await vectors(input="a text alone")
        np.testing.assert_allclose(found, [expected("a text alone")], atol=2e-6)
        answer = await http.post("/v1/embeddings", json={"model": "x", "input": [{}]})
        assert answer.status_code == 400 and "give text, image or both" in answer.text
