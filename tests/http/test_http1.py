"""HTTP/1.1 as the server speaks it on raw sockets: framing, pipelines, upgrades, refusals, and the end of
input."""

import json
import socket
from collections.abc import Callable

import anyio
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.http import http1, request_cycle
from tests.http.fake import FakeService
from tests.http.serving import Raw, serving

pytestmark = pytest.mark.anyio

GET = b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
POST = b"POST /generate HTTP/1.1\r\nhost: t\r\n"
BODY = json.dumps({"text": "hi", "sampling_params": {"max_new_tokens": 3}}).encode()


def app_of(serve: Callable[[Scope, Receive, Send], object]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await serve(scope, receive, send)  # type: ignore[misc]

    return app


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with method, target and body, in chunks."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    text = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} ".encode()
    await send({"type": "http.response.body", "body": text, "more_body": True})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_requests_may_come_in_any_pieces(size: int) -> None:
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%b\r\n" % (10, BODY[:10]) + b"%x;ext=1\r\n%b\r\n" % (len(BODY) - 10, BODY[10:])
    whole = GET + chunked + b"0\r\ntrailer: x\r\n\r\n" + LAST
    service = FakeService()
    async with serving(service) as address, Raw.connected(address) as client:
        for at in range(0, len(whole), size):
            await client.write(whole[at : at + size])
        answers = await client.to_end()
    assert answers.count(b"HTTP/1.1 200 ") == 3 and len(service.requests) == 1


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /h\xc3\xa9 HTTP/1.1\r\nhost: t\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: t\r\nbad name: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: t\r\nx: y\n folded\r\n\r\n", 400),
        (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\n", 400),
        (POST + b"content-length: -3\r\n\r\n", 400),
        (POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
    ],
)
async def test_what_is_no_request_is_refused_after_those_before_it(head: bytes, status: int) -> None:
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(GET + head)
        first, second = (await client.to_end()).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ") and second.startswith(b"%d " % status)
    assert b"connection: close" in second
    assert "error" in json.loads(second.partition(b"\r\n\r\n")[2]), "and what is wrong is said"


async def test_an_endless_head_or_trailer_ends_the_connection() -> None:
    for begin in (b"GET / HTTP/1.1\r\nx: ", POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: "):
        async with serving(FakeService()) as address, Raw.connected(address) as client:
            with anyio.fail_after(20):
                try:
                    await client.write(begin)
                    for _ in range(100):
                        await client.write(b"x" * 2**14)
                except ConnectionError:
                    pass
                assert b"HTTP/1.1 2" not in await client.to_end()


async def test_a_client_that_expects_to_be_asked_for_its_body_is_asked() -> None:
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(POST + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(BODY))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.write(BODY)
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_pipelined_requests_are_answered_in_order_however_many() -> None:
    async with serving(app_of(echo)) as address, Raw.connected(address) as client:
        requests = [b"POST /%d?q HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\n\r\nabc" % i for i in range(200)]
        await client.write(b"".join(requests))
        for i in range(200):
            assert b"POST /%d q \r\n3\r\nabc" % i in await client.until(b"0\r\n\r\n")


async def test_more_than_the_backlog_waits_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "MAX_BACKLOG_BYTES", 1000)
    monkeypatch.setattr(request_cycle, "MAX_UNREAD_BYTES", 1000)
    body = b"x" * 300_000
    async with serving(app_of(echo)) as address, Raw.connected(address) as client:

        async def write() -> None:
            for _ in range(3):
                head = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body)
                await client.write(head + body)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            for _ in range(3):
                assert (await client.until(b"0\r\n\r\n")).count(b"x") >= len(body)


async def test_an_upgrade_in_the_pipeline_waits_for_its_turn() -> None:
    upgrade = (
        b"GET /v1/ws HTTP/1.1\r\nhost: t\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(GET + GET + upgrade)
        assert (await client.until(b"HTTP/1.1 101 ")).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("more", [b"upgrade: other\r\n", b"upgrade: h2c\r\ncontent-length: 0\r\n"])
async def test_upgrades_that_are_not_spoken_are_requests_like_others(more: bytes) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\n%b\r\n" % more
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(request + request + LAST)
        assert (await client.to_end()).count(b"HTTP/1.1 200 ") == 3


async def test_answers_to_head_have_no_body() -> None:
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(GET.replace(b"GET", b"HEAD") + LAST)
        head, second = (await client.to_end()).split(b"HTTP/1.1 200 ")[1:]
    assert head.endswith(b"\r\n\r\n") and b"content-length: " in head and not second.endswith(b"\r\n\r\n")


async def test_an_application_that_fails_ends_its_answer_only() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/started":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    for path, expected in ((b"/", b"HTTP/1.1 500 "), (b"/started", b"HTTP/1.1 200 ")):
        async with serving(app_of(fail)) as address, Raw.connected(address) as client:
            await client.write(GET.replace(b"/health", path))
            answer = await client.to_end()
        assert answer.startswith(expected) and not answer.endswith(b"0\r\n\r\n")


async def test_headers_of_answers_have_no_line_breaks() -> None:
    async def split(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x", b"a\r\nset-cookie: b")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async with serving(app_of(split)) as address, Raw.connected(address) as client:
        await client.write(GET)
        answer = await client.to_end()
    assert answer.startswith(b"HTTP/1.1 500 ") and b"cookie" not in answer


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01", b"nothing\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_bytes_that_are_no_request_get_an_error(data: bytes) -> None:
    """A client of https://, a program that speaks something else, and a request without a host."""
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(data)
        head, _, body = (await client.to_end()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and f"content-length: {len(body)}".encode() in head
    message = json.loads(body)["error"]["message"]
    assert "host header" in message and "--ssl-certfile" in message


async def test_half_a_request_and_the_end_of_input_is_refused() -> None:
    for half in (GET[:-2], POST + b"content-length: 9\r\n\r\n{"):
        async with serving(FakeService()) as address, Raw.connected(address) as client:
            await client.write(half)
            client.sock.shutdown(socket.SHUT_WR)
            assert (await client.to_end()).startswith(b"HTTP/1.1 400 ")


async def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "KEEP_ALIVE_S", 0.1)
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        with anyio.fail_after(20):
            await client.write(GET)
            assert (await client.to_end()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("coding", "status"), [(b"gzip", b"400"), (b"br", b"400"), (b"identity", b"200")])
async def test_a_compressed_body_is_refused_as_such(coding: bytes, status: bytes) -> None:
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        head = POST + b"connection: close\r\ncontent-length: %d\r\ncontent-encoding: %b\r\n\r\n"
        await client.write(head % (len(BODY), coding) + BODY)
        answer = await client.to_end()
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert (b"the body is encoded (%b)" % coding in answer) == (status == b"400")
