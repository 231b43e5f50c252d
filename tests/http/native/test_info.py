"""Model and server info, tokenize and detokenize."""

from typing import Any

import httpx
import pytest
from jinja2 import Environment

from runtime import Engine
from runtime.http.app import http_app
from runtime.messages.requests import Chat, Text
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio


async def call(service: FakeService, path: str, method: str = "POST", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        return await http.request(method, path, json=body) if body else await http.request(method, path)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_tokenize(path: str) -> None:
    service = FakeService()
    assert (await call(service, path, prompt="ab", return_token_strs=True)).json() == {
        "tokens": [97, 98],
        "count": 2,
        "max_model_len": 100_000,
        "token_strs": ["<97>", "<98>"],
    }
    assert (await call(service, path, prompt=["a", "bc"], add_special_tokens=False)).json() == {
        "tokens": [[97], [98, 99]],
        "count": [1, 2],
        "max_model_len": 100_000,
    }
    assert service.controls.calls == [Text("ab"), Text("a", False), Text("bc", False)]


async def test_tokenize_a_chat() -> None:
    service = FakeService()
    messages = [{"role": "user", "content": "hi"}]
    assert (await call(service, "/tokenize", messages=messages, add_generation_prompt=False)).json()[
        "count"
    ] > 0
    assert service.controls.calls == [Chat(messages, None, {"add_generation_prompt": False})]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_detokenize(path: str) -> None:
    assert (await call(FakeService(), path, tokens=[1, 2])).json() == {"text": "<1><2>", "prompt": "<1><2>"}
    assert (await call(FakeService(), path, tokens=[[1], [2, 3]])).json()["text"] == ["<1>", "<2><3>"]
    assert (await call(FakeService(), path, tokens=[])).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "x"}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/encode", {"text": "a"}, None),
    ],
)
async def test_what_is_wrong_is_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    response = await call(FakeService(), path, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


async def test_info_in_the_forms_of_sglang() -> None:
    for path in ("/get_server_info", "/server_info"):
        info = (await call(FakeService(), path, "GET")).json()
        assert (
            info["port"] == 1
            and info["options"]["port"] == 1
            and info["internal_states"][0]["last_gen_throughput"] == 1.5
        )
    for path in ("/get_model_info", "/model_info"):
        info = (await call(FakeService(), path, "GET")).json()
        assert info["served_model_name"] == "org/fake" and info["is_generation"] is True
    assert (await call(FakeService(), "/version", "GET")).json() == {"version": "0"}


async def test_the_load_in_the_form_of_vllm() -> None:
    assert (await call(FakeService(), "/load", "GET")).json() == {"server_load": 0}


async def test_what_lm_eval_reads_of_the_tokenizer() -> None:
    """Its remote tokenizer renders chats and finds the ids of special tokens itself."""
    async with Engine(num_threads=1) as engine:
        transport = httpx.ASGITransport(engine.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            info = (await http.get("/tokenizer_info")).json()
            assert {"bos_token", "eos_token", "pad_token", "chat_template"} <= info.keys()
            body = {"prompt": info["eos_token"], "add_special_tokens": False}
            ids = (await http.post("/tokenize", json=body)).json()["tokens"]
            assert len(ids) == 1
            assert (await http.post("/detokenize", json={"tokens": [5, 6]})).json()["prompt"]
            messages = [{"role": "user", "content": "hi"}]
            text = (
                Environment()
                .from_string(info["chat_template"])
                .render(messages=messages, add_generation_prompt=True)
            )
            ours = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
            body = {"prompt": text, "add_special_tokens": False}
            assert (await http.post("/tokenize", json=body)).json()["tokens"] == ours
