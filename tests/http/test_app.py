"""The application under servers that are not ours, mounted under prefixes, and its smaller routes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from runtime.http.app import http_app
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield http


def events(stream: str) -> list[Any]:
    return [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]


async def test_two_services_under_two_prefixes() -> None:
    one, two = FakeService(), FakeService(defaults={"temperature": 0.25})
    app = Starlette(routes=[Mount("/one", http_app(one)), Mount("/deep/two", http_app(two))])
    async with client(app) as http:
        for prefix in ("/one", "/deep/two"):
            stream = await http.post(f"{prefix}/v1/completions", json={"prompt": "hi", "stream": True})
            whole = await http.post(f"{prefix}/v1/completions", json={"prompt": "hi"})
            assert (
                "".join(e["choices"][0]["text"] for e in events(stream.text))
                == whole.json()["choices"][0]["text"]
            )
            assert stream.text.endswith("data: [DONE]\n\n")
            missing = await http.get(f"{prefix}/v1/nothing")
            assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    assert [request.params.temperature for request in one.requests] == [1.0, 1.0]
    assert [request.params.temperature for request in two.requests] == [0.25, 0.25]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_foreign_server_reports_that_the_client_left(is_stream: bool) -> None:
    service = FakeService(hold=True)
    gone = anyio.Event()
    sent: list[Any] = []
    bodies = iter(
        [
            {
                "type": "http.request",
                "body": json.dumps({"text": "x", "stream": is_stream}).encode(),
                "more_body": False,
            }
        ]
    )

    async def receive() -> Any:
        if (message := next(bodies, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "client": None,
        "server": None,
    }
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(http_app(service), scope, receive, send)
        while not service.running:
            await anyio.lowlevel.checkpoint()
        if is_stream:
            service.step()  # the first event goes out, and the client leaves on it
        else:
            gone.set()
    assert service.aborted == [service.requests[0].id]
    assert not is_stream or sent[0]["status"] == 200


async def test_a_slow_foreign_server_gets_deltas_in_one_piece() -> None:
    service = FakeService(hold=True)
    sent: list[bytes] = []
    bodies = iter(
        [
            {
                "type": "http.request",
                "body": b'{"prompt": "x", "stream": true, "max_tokens": 9}',
                "more_body": False,
            }
        ]
    )

    async def receive() -> Any:
        return next(bodies, None) or await anyio.sleep_forever()

    async def send(message: Any) -> None:
        if "body" in message:
            sent.append(message["body"])
        for _ in range(4):  # while one send is under way, more comes
            service.step()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"",
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "client": None,
        "server": None,
    }
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(http_app(service), scope, receive, send)
        while not service.running:
            await anyio.lowlevel.checkpoint()
        service.step()
    texts = ["".join(e["choices"][0]["text"] for e in events(piece.decode())) for piece in sent]
    assert len(events(b"".join(sent).decode())) == 2 and sent[-1].endswith(b"data: [DONE]\n\n")
    async with client(http_app(FakeService())) as http:
        whole = (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})).json()
    assert "".join(texts) == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    ("state", "status"), [("ready", 200), ("loading", 503), ("draining", 503), ("failed", 503)]
)
async def test_health_is_the_state(state: str, status: int) -> None:
    async with client(http_app(FakeService(state=state))) as http:
        response = await http.get("/health")
    assert response.status_code == status and response.json()["state"] == state


async def test_what_operators_ask() -> None:
    service = FakeService()
    async with client(http_app(service)) as http:
        probe = await http.get("/health_generate")
        assert probe.status_code == 200 and len(probe.json()["output_ids"]) == 1
        assert service.requests[0].params.max_new_tokens == 1
        load = (await http.get("/v1/loads")).json()["loads"][0]
        assert (load["num_used_tokens"], load["num_cached_tokens"], load["max_total_num_tokens"]) == (
            48,
            16,
            160,
        )
        assert (await http.get("/server_info")).json().items() >= service.server_info().items()
        metrics = await http.get("/metrics")
        assert metrics.text == service.metrics().decode() and metrics.headers["content-type"].startswith(
            "text/plain; version=0.0.4"
        )
        assert (await http.head("/health")).status_code == 200
