"""Embeddings of texts and images (CLIP, SigLIP) over HTTP, against transformers."""

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

import runtime
from runtime.errors import ModelError
from tests.models.make_dual import Dual, image_vector, make_dual, text_vector
from tests.models.make_media import picture

A, B = picture(1), picture(2, 60, 30)
TEXTS = ["a photo", "two cats"]
OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "served_model_name": "x"}


@pytest.fixture(scope="module", params=["clip", "siglip", "naflex"])
def dual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dual]:
    folder = tmp_path_factory.mktemp("dual")
    return folder, make_dual(folder, request.param)


def data_url(image: np.ndarray) -> str:
    Image.fromarray(image).save(file := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


async def opened(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        runtime.Engine(model_path=str(folder), **OPTIONS | options) as engine,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(engine.asgi()), base_url="http://test", timeout=60
        ) as http,
    ):
        yield http


async def vectors(http: httpx.AsyncClient, **body: Any) -> np.ndarray:
    answer = await http.post("/v1/embeddings", json={"model": "x"} | body)
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True}], ids=str)
async def test_vectors_are_those_of_transformers(options: dict[str, Any], dual: tuple[Path, Dual]) -> None:
    folder, model = dual
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [text_vector(model, tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS]
    images = [image_vector(model, image) for image in (A, B)]
    assert np.abs(unit(images[0]) - unit(images[1])).max() > 1e-3, "images matter"
    async for http in opened(folder, **options):
        found = await vectors(http, input=TEXTS)
        np.testing.assert_allclose(found, [unit(one) for one in texts], atol=2e-6)
        raw = await vectors(http, input=TEXTS[0], normalize=False)
        np.testing.assert_allclose(raw, [texts[0]], rtol=2e-5, atol=2e-5)
        items = [{"text": TEXTS[0]}, {"image": data_url(A)}, {"text": TEXTS[1]}, {"image": data_url(B)}]
        expected = [texts[0], images[0], texts[1], images[1]]
        found = await vectors(http, input=items)
        np.testing.assert_allclose(found, [unit(one) for one in expected], atol=2e-6)
        for part, vector in (
            ({"type": "image_url", "image_url": {"url": data_url(B)}}, images[1]),
            ({"type": "text", "text": TEXTS[1]}, texts[1]),
        ):
            found = await vectors(http, messages=[{"role": "user", "content": [part]}])
            np.testing.assert_allclose(found, [unit(vector)], atol=2e-6)


@pytest.mark.anyio
async def test_refusals_name_the_field(dual: tuple[Path, Dual]) -> None:
    part = {"type": "text", "text": "a"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"text": "a", "image": "b"}]}, "input[0]"),
        ({"input": [{"text": "a"}, "b"]}, "input"),
        ({"input": [{"image": "no base64!"}]}, "input[0].image"),
        ({"messages": [{"role": "user", "content": [part, part]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({}, "input"),
    ]
    async for http in opened(dual[0]):
        for body, param in cases:
            answer = await http.post("/v1/embeddings", json={"model": "x"} | body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.anyio
async def test_other_pooling_is_refused(dual: tuple[Path, Dual]) -> None:
    with pytest.raises(ModelError, match="--pooling mean: texts of this model are their last token"):
        async for _ in opened(dual[0], pooling="mean"):
            pass
