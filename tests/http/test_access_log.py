"""The access log, on our own server and over ASGI."""

import io
import json
from collections.abc import Iterator

import httpx
import pytest

from runtime import log
from runtime.http.access_log import level_of
from runtime.http.app import http_app
from runtime.http.settings import HttpSettings
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    log.setup("info", "json", stream)
    yield stream
    log.silence()


@pytest.mark.parametrize(
    ("level", "expected"),
    [("info", ["/generate", "/generate", "/nowhere"]), ("warning", ["/nowhere"]), (None, [])],
)
async def test_requests_are_logged(level: str | None, expected: list[str], lines: io.StringIO) -> None:
    app = http_app(FakeService(), HttpSettings(access_level=level, unlogged_paths=("/health", "/metrics")))
    async with serving(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        for is_stream in (False, True):
            answer = await http.post(
                "/generate?key=secret",
                json={"text": "hi", "stream": is_stream},
                headers={"x-request-id": "mine"},
            )
            assert answer.status_code == 200 and len(answer.text) > 10
        await http.get("/health")
        await http.get("/nowhere")
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["path"] for line in found] == expected and "secret" not in lines.getvalue()
    if level == "info":
        first = found[0]
        assert (first["status"], first["method"], first["id"], first["client"]) == (
            200,
            "POST",
            "mine",
            "127.0.0.1",
        )
        assert (found[2]["status"], found[2]["level"]) == (404, "warning") and first["seconds"] > 0


def test_levels() -> None:
    assert [level_of(status) for status in (200, 304, 401, 499, 503)] == [
        "info",
        "info",
        "warning",
        "info",
        "error",
    ]
