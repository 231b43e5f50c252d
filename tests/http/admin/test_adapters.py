"""How requests name an adapter, in every API, and the routes that load and unload adapters."""

from typing import Any

import httpx
import pytest

from runtime.http.app import http_app
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def client(service: FakeService) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(http_app(service)), base_url="http://test")


async def loaded(http: Any) -> None:
    for name in ("x", "y"):
        answer = await http.post(
            "/load_lora_adapter", json={"lora_name": name, "lora_path": f"/adapters/{name}"}
        )
        assert answer.status_code == 200 and answer.json()["loaded_adapters"][name] == f"/adapters/{name}"


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/generate", {"text": "Hi"}, [""]),
        ("/generate", {"text": "Hi", "lora_path": "x"}, ["x"]),
        ("/generate", {"text": ["a", "b", "c"], "lora_path": ["x", None, "y"]}, ["x", "", "y"]),
        (CHAT, {"messages": HI, "model": "org/fake"}, [""]),
        (CHAT, {"messages": HI, "model": "x"}, ["x"]),
        (CHAT, {"messages": HI, "model": "org/fake:y"}, ["y"]),
        (CHAT, {"messages": HI, "lora_path": "y"}, ["y"]),
        (TEXT, {"prompt": ["a", "b"], "lora_path": ["y", "x"]}, ["y", "x"]),
        (TEXT, {"prompt": "a", "model": "x", "lora_path": "x"}, ["x"]),
        ("/v1/responses", {"input": "Hi", "model": "x"}, ["x"]),
        ("/v1/messages", {"messages": HI, "max_tokens": 4, "model": "y"}, ["y"]),
        ("/api/chat", {"messages": HI, "model": "x:latest", "stream": False}, ["x"]),
    ],
)
async def test_names(path: str, body: dict[str, Any], wanted: list[str]) -> None:
    service = FakeService()
    async with client(service) as http:
        await loaded(http)
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        if body.get("model") in ("x", "org/fake:y") and path in (CHAT, TEXT):
            assert answer.json()["model"] == body["model"]
    assert [request.adapter for request in service.requests] == wanted


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"messages": HI, "model": "z"}, 404, "this server has org/fake and the adapters x, y"),
        (CHAT, {"messages": HI, "model": "org/fake:z"}, 404, "adapters x, y"),
        (CHAT, {"messages": HI, "model": "x", "lora_path": "y"}, 400, "give one of them"),
        (TEXT, {"prompt": ["a", "b"], "lora_path": ["y"]}, 400, "1 entries for 2 prompts"),
    ],
)
async def test_wrong_names(path: str, body: dict[str, Any], status: int, words: str) -> None:
    async with client(FakeService()) as http:
        await loaded(http)
        answer = await http.post(path, json=body)
    assert answer.status_code == status and words in answer.text, answer.text


async def test_listed_with_the_model() -> None:
    async with client(FakeService()) as http:
        await loaded(http)
        models = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [
            ("org/fake", None),
            ("x", "org/fake"),
            ("y", "org/fake"),
        ]
        assert (await http.get("/v1/models/x")).json()["parent"] == "org/fake"


async def test_they_go() -> None:
    async with client(FakeService()) as http:
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/adapters/x"})
        assert answer.status_code == 200 and answer.text.startswith("Success")
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})).status_code == 200
        assert (await http.post("/unload_lora_adapter", json={"lora_name": "x"})).status_code == 400
    async with client(FakeService(adapters=None)) as http:
        answer = await http.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": "/adapters/x"})
    assert answer.status_code == 400 and "--enable-lora" in answer.text
