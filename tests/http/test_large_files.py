"""Large files in base64: taken out of bodies before these are decoded, in /v1/responses and over WebSockets,
and stored as they came."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from runtime.http import websocket
from runtime.http.app import http_app
from runtime.http.cut_body import MIN_BYTES, cut, with_texts
from runtime.http.openai.responses import routes
from runtime.http.openai.stored_objects import StoredObjects
from runtime.memory_file import MemoryFile
from runtime.messages.media import MediaKind
from tests.http.fake import FakeService
from tests.http.serving import serving
from tests.http.test_websocket import receive, send, socket

pytestmark = pytest.mark.anyio
HEAD, FILE = "data:image/png;base64,", b64encode(bytes(range(256)) * (MIN_BYTES // 256)).decode()
ITEMS = [{"role": "user", "content": [{"type": "input_image", "image_url": HEAD + FILE}]}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def seeing() -> FakeService:
    return FakeService(media_kinds=frozenset({MediaKind.IMAGE}))


def decoded_bytes(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[int]:
    """Bytes of all bodies that this function reads from now on."""
    found: list[int] = []
    read = getattr(place, name)

    def spy(content: bytes) -> Any:
        found.append(len(content))
        return read(content)

    monkeypatch.setattr(place, name, spy)
    return found


async def test_responses_are_stored_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """No body is decoded whole, but that of a text which only looks like a file."""
    decoded, service = decoded_bytes(monkeypatch, routes, "read_response"), seeing()
    transport = httpx.ASGITransport(http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post("/v1/responses", json={"input": ITEMS})
        assert answer.status_code == 200, answer.text
        (file,) = service.requests[-1].media
        assert (file.url, file.base64) == (HEAD, "") and file.encoded is not None
        assert file.encoded.read().decode() == FILE and max(decoded) < 1024
        (item,) = (await http.get(f"/v1/responses/{answer.json()['id']}/input_items")).json()["data"]
        assert item["content"] == ITEMS[0]["content"]
        text = await http.post("/v1/responses", json={"input": "hi", "user": FILE})
        assert text.json()["user"] == FILE and max(decoded) > MIN_BYTES
        refused = await http.post("/v1/responses", json={"input": ITEMS, "temperature": -1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("stream", [False, True])
async def test_files_in_the_background(stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored with each state of the response, and no body is decoded whole."""
    decoded, service = decoded_bytes(monkeypatch, routes, "read_response"), seeing()
    stored = StoredObjects(service, tmp_path, 2**24)
    transport = httpx.ASGITransport(http_app(service, stored_objects=stored))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(stored.run)
        await anyio.wait_all_tasks_blocked()
        answer = await http.post("/v1/responses", json={"input": ITEMS, "background": True, "stream": stream})
        assert answer.status_code == 200, answer.text
        first = answer.text.partition("data: ")[2].partition("\n")[0] if stream else answer.text
        given = json.loads(first)
        id = given["response"]["id"] if stream else given["id"]
        (shown,) = (await http.get(f"/v1/responses/{id}/input_items")).json()["data"]
        with anyio.fail_after(30):
            while (await http.get(f"/v1/responses/{id}")).json()["status"] in ("queued", "in_progress"):
                await anyio.sleep(0.01)
        (item,) = (await http.get(f"/v1/responses/{id}/input_items")).json()["data"]
        assert shown["content"] == item["content"] == ITEMS[0]["content"]
        (file,) = service.requests[-1].media
        assert file.encoded is not None and file.encoded.read().decode() == FILE and max(decoded) < 1024
        tasks.cancel_scope.cancel()


async def test_counting_decodes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, service = decoded_bytes(monkeypatch, routes, "read_response"), seeing()
    files: list[Any] = []

    async def tokenize(prompt: Any, media: Any = ()) -> list[int]:
        files.extend(media)
        return [1, 2, 3]

    service.control.tokenize = tokenize  # type: ignore[method-assign]
    transport = httpx.ASGITransport(http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        counted = await http.post("/v1/responses/input_tokens", json={"input": ITEMS})
    assert counted.json()["input_tokens"] == 3 and max(decoded) < 1024
    assert [file.encoded.read().decode() for file in files] == [FILE]


async def test_messages_of_a_socket_are_decoded_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, service = decoded_bytes(monkeypatch, websocket, "read_message"), seeing()
    part = {"type": "image_url", "image_url": {"url": HEAD + FILE}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    async with serving(service) as address, socket(address) as connection:
        await send(connection, id="a", path="/v1/chat/completions", body=body)
        assert "answer" in await receive(connection)
        (file,) = service.requests[-1].media
        assert file.encoded is not None and file.encoded.read().decode() == FILE and max(decoded) < 1024
        text = {"messages": [{"role": "user", "content": "hi"}], "user": FILE, "max_tokens": 2}
        await send(connection, id="b", path="/v1/chat/completions", body=text)
        assert "answer" in await receive(connection), "a text that looks like a file"
        await send(connection, id=FILE, path="/v1/chat/completions", body=text)
        refused = await receive(connection)
        assert refused["status"] == 400 and refused["id"] == FILE


def test_texts_stand_where_their_marks_were() -> None:
    value = {"a": HEAD + FILE, "b": [FILE, 1], "c": "d"}
    memory = MemoryFile()
    memory.append(msgspec.json.encode(value))
    body = cut(memory)
    assert len(body.texts) == 2 and with_texts(body.content, body.texts) == body.whole
    assert with_texts(body.whole, {}) == body.whole
