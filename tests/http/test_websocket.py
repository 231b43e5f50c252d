"""Many requests over one WebSocket, with a real client."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
import websockets
from starlette.responses import Response
from websockets.asyncio.client import ClientConnection, connect

from runtime.errors import InvalidRequest
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.fields.headers import RequestHeaders
from runtime.http.openai.completions import completions
from runtime.http.server import listen, serve
from runtime.http.settings import HttpSettings
from runtime.http.streaming.exchange import Answer
from runtime.http.websocket import Socket, payloads
from tests.http.fake import FakeService
from tests.http.openai.test_tools import ASK as TOOLS_ASK
from tests.http.openai.test_tools import HERMES, SAYS
from tests.http.serving import serving, stepping

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 5},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 5}},
    "/v1/messages": CHAT | {"model": "default"},
    "/api/chat": {"model": "org/fake", "messages": CHAT["messages"], "options": {"num_predict": 5}},
    "/api/generate": {"model": "org/fake", "prompt": "hi", "options": {"num_predict": 5}},
}


@asynccontextmanager
async def socket(address: tuple[str, int], **more: Any) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://{address[0]}:{address[1]}/v1/ws", **more) as connection:
        yield connection


async def send(connection: ClientConnection, **message: Any) -> None:
    await connection.send(json.dumps(message))


async def receive(connection: ClientConnection) -> dict[str, Any]:
    with anyio.fail_after(20):
        message: dict[str, Any] = json.loads(await connection.recv())
    return message


@pytest.mark.parametrize("path", BODIES)
async def test_events_are_those_of_the_http_route(path: str) -> None:
    async with serving(FakeService()) as address, socket(address) as connection, httpx.AsyncClient() as http:
        body = BODIES[path] | {"stream": True}
        answer = await http.post(f"http://{address[0]}:{address[1]}{path}", json=body)
        await send(connection, id="a", path=path, body=body)
        events = []
        while "done" not in (message := await receive(connection)):
            assert message.keys() == {"id", "event"} and message["id"] == "a", message
            events.append(message["event"])
        wanted = [json.loads(payload) for payload in payloads(answer.content)]
        assert [without_names(event) for event in events] == [without_names(event) for event in wanted]
        await send(connection, id="a", path=path, body=BODIES[path] | {"stream": False})
        whole = (await receive(connection))["answer"]
        assert without_names(whole) == without_names(
            (
                await http.post(
                    f"http://{address[0]}:{address[1]}{path}", json=BODIES[path] | {"stream": False}
                )
            ).json()
        )


def without_names(value: Any) -> Any:
    """Without what differs from one answer to the next."""
    if isinstance(value, list):
        return [without_names(one) for one in value]
    if isinstance(value, dict):
        return {
            name: without_names(one)
            for name, one in value.items()
            if name not in ("id", "created", "created_at", "e2e_latency") and not name.endswith("_duration")
        }
    return value


async def test_requests_run_side_by_side_and_end_one_by_one() -> None:
    service = FakeService(hold=True)
    async with serving(service) as address, socket(address) as connection:
        for name, count in (("a", 6), ("b", 2), ("c", 100)):
            await send(
                connection,
                id=name,
                path="/v1/completions",
                body={"prompt": name, "max_tokens": count, "stream": True},
            )
        while len(service.running) < 3:
            await anyio.sleep(0.001)
        async with stepping(service):
            ends, texts = [], {"a": 0, "b": 0, "c": 0}
            while len(ends) < 3:
                message = await receive(connection)
                if "done" in message:
                    ends.append(message["id"])
                    if ends == ["b", "a"]:
                        await send(connection, id="c", abort=True)
                else:
                    texts[message["id"]] += 1
        assert (
            ends == ["b", "a", "c"] and min(texts.values()) > 0 and texts["c"] < 100 and not service.running
        )
        assert len(service.aborted) == 1


async def test_a_request_without_an_upgrade_reads_what_the_route_takes() -> None:
    transport = httpx.ASGITransport(http_app(FakeService()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/v1/ws")
    assert answer.status_code == 404
    assert (
        answer.json()["error"]["message"] == "there is no route /v1/ws for requests; open it as a WebSocket"
    )


async def test_who_leaves_aborts_what_is_open() -> None:
    service = FakeService(hold=True)
    async with serving(service) as address:
        async with socket(address) as connection:
            for name in "abc":
                await send(
                    connection, id=name, path="/v1/completions", body={"prompt": name, "stream": name != "c"}
                )
            while len(service.running) < 3:
                await anyio.sleep(0.001)
        with anyio.fail_after(20):
            while service.running:
                await anyio.sleep(0.001)
    assert len(service.aborted) == 3


async def test_what_is_wrong_is_answered_and_harms_no_request() -> None:
    service = FakeService()
    async with (
        serving(http_app(service, HttpSettings(max_body_bytes=1000))) as address,
        socket(address) as connection,
    ):
        for message, status, word in (
            ('{"id": "x", "path": "/nowhere", "body": {}}', 400, "path"),
            ("nonsense", 400, "JSON"),
            ('{"path": "/generate"}', 400, "id"),
            ('{"id": "x", "path": "/generate", "nonsense": 1}', 400, "nonsense"),
            ('{"id": "x", "path": "/generate"}', 400, "text"),
            (
                '{"id": "x", "path": "/v1/completions", "body": {"prompt": "x", "temperature": -1}}',
                400,
                "temperature",
            ),
            ('{"id": "x", "path": "/v1/completions", "body": {"prompt": "x", "model": "y"}}', 404, "model"),
            ('{"id": "x", "path": "/v1/completions", "body": "' + "x" * 1000 + '"}', 413, "bytes"),
            ("[" * 900, 400, ""),
        ):
            await connection.send(message)
            refused = await receive(connection)
            assert refused["status"] == status and word in refused["error"]["message"], refused
            assert refused["id"] == ("x" if '"id"' in message else "")
        await connection.send(b'{"id": "x", "path": "/v1/messages", "body": {}}')
        assert (await receive(connection))["type"] == "error"
        service.fail_after, service.fail_with = 2, InvalidRequest("it broke")
        await send(connection, id="s", path="/v1/completions", body={"prompt": "x", "stream": True})
        assert "it broke" in json.dumps(await receive(connection))
        service.fail_after = None
        await send(connection, id="x", path="/generate", body={"text": "hi"})
        assert (await receive(connection))["answer"]["text"]


async def test_a_bug_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Answer) -> None:
        raise ZeroDivisionError

    async with serving(FakeService()) as address, socket(address) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(Answer, "complete", fail)
            await send(connection, id="x", path="/generate", body={"text": "hi"})
            assert (await receive(connection))["status"] == 500
        await send(connection, id="x", path="/generate", body={"text": "hi"})
        assert "answer" in await receive(connection)


async def test_an_id_is_used_once_at_a_time() -> None:
    service = FakeService(hold=True)
    async with serving(service) as address, socket(address) as connection:
        for _ in range(2):
            await send(connection, id="a", path="/v1/completions", body={"prompt": "x"})
        assert "open" in (await receive(connection))["error"]["message"]
        await send(connection, id="nobody", abort=True)
        service.run()
        assert "answer" in await receive(connection)
        await send(connection, id="a", path="/v1/completions", body={"prompt": "x", "max_tokens": 1})
        while not service.running:
            await anyio.sleep(0.001)
        service.run()
        assert "answer" in await receive(connection)


async def test_streams_report_calls_as_over_http() -> None:
    body = {name: value for name, value in TOOLS_ASK.items() if name != "model"} | {"stream": True}
    async with serving(FakeService(formats=HERMES, says=SAYS)) as address, socket(address) as connection:
        await send(connection, id="a", path="/v1/chat/completions", body=body)
        deltas = []
        while "event" in (message := await receive(connection)):
            deltas += [choice["delta"] for choice in message["event"]["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls and calls[0]["function"]["name"] == "add"
    assert "<tool_call>" not in "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing", "/tokenize"])
async def test_an_id_is_free_before_its_end_is_reported(path: str) -> None:
    """While the end waits to be sent, the next request of that id may be here already."""

    class Slow:
        scope: dict[str, Any] = {}

        def __init__(self) -> None:
            self.sent: list[Any] = []

        async def send_text(self, text: str) -> None:
            self.sent.append((json.loads(text), dict(carrier.open)))

    slow = Slow()
    served = {"/v1/completions": completions, "/tokenize": lambda service, body: Response(b"[1]")}
    carrier = Socket(FakeService(), HttpSettings(), served, slow, RequestHeaders())  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": 1.5}):
            await carrier._handle(json.dumps({"id": "a", "path": path, "body": body}).encode(), tasks)
            await anyio.wait_all_tasks_blocked()
    ends = [open_then for message, open_then in slow.sent if "event" not in message]
    assert len(ends) == 3 and ends == [{}] * 3 and carrier.num_serving == 0


@pytest.mark.parametrize(
    ("headers", "origin", "is_let_in"),
    [
        ({}, None, False),
        ({"authorization": "Bearer k"}, None, True),
        ({"x-api-key": "k"}, None, True),
        ({"x-api-key": "k2"}, None, False),
        ({"x-api-key": "k"}, "https://page.example", True),
        ({"x-api-key": "k"}, "https://other.example", False),
        ({"x-api-key": "k", "x-request-timeout": "soon"}, None, False),
    ],
)
async def test_who_may_come_in(headers: dict[str, str], origin: Any, is_let_in: bool) -> None:
    app = http_app(FakeService(), HttpSettings(keys=Keys(("k",)), cors_origins=("https://page.example",)))
    async with serving(app) as address:
        if is_let_in:
            async with socket(address, additional_headers=headers, origin=origin) as connection:
                await send(connection, id="a", path="/generate", body={"text": "hi"})
                assert "answer" in await receive(connection)
        else:
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with socket(address, additional_headers=headers, origin=origin):
                    pass
            assert refused.value.response.status_code == 403


async def test_a_page_of_the_server_itself_may_come_in() -> None:
    async with serving(FakeService()) as (host, port):
        async with socket((host, port), origin=f"http://{host}:{port}") as connection:
            await send(connection, id="a", path="/generate", body={"text": "hi"})
            assert "answer" in await receive(connection)


async def test_a_server_that_stops_lets_requests_end_and_closes() -> None:
    service = FakeService(hold=True)
    sockets = listen("127.0.0.1", 0)
    shutdown = anyio.Event()
    async with anyio.create_task_group() as tasks:
        address = sockets[0].getsockname()
        tasks.start_soon(lambda: serve(http_app(service), sockets=sockets, shutdown=shutdown, grace_s=20))
        async with socket(address) as connection, socket(address) as idle:
            await send(connection, id="a", path="/v1/completions", body={"prompt": "x"})
            while not service.running:
                await anyio.sleep(0.001)
            shutdown.set()
            with pytest.raises(websockets.ConnectionClosed):
                await receive(idle)
            service.run()
            assert "answer" in await receive(connection)
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await receive(connection)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
