"""Request bodies that are sent to fill memory or to hold places: without a key, unfinished, silent, many at
once. What the server holds is counted in bytes by its own BodyBudget."""

import json
from collections.abc import Callable

import anyio
import pytest

from runtime.http import app, body
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.body_budget import BodyBudget
from runtime.http.hosts import AllowedHosts
from runtime.http.settings import HttpSettings
from tests.http.fake import FakeService
from tests.http.serving import Raw, serving

pytestmark = pytest.mark.anyio

GENERATE = b'{"text": "hi", "sampling_params": {"max_new_tokens": 5}}'
UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nhost: t\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PATHS = ("/generate", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/batches", "/nothing")


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[BodyBudget]:
    """The budgets of the applications that the test makes."""
    made: list[BodyBudget] = []

    def make(max_bytes: int) -> BodyBudget:
        made.append(BodyBudget(max_bytes))
        return made[-1]

    monkeypatch.setattr(app, "BodyBudget", make)
    return made


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_without_a_key_are_not_kept(path: str, budgets: list[BodyBudget]) -> None:
    async with serving(http_app(FakeService(), HttpSettings(keys=Keys(("k",))))) as address:

        async def send() -> None:
            async with Raw.connected(address) as client:
                await client.send(path, b"x" * 200_000, declared=15_000_000)
                answer = await client.until(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 404 " if path == "/nothing" else b"HTTP/1.1 401 ")

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(send)
    assert [budget.peak_bytes for budget in budgets] == [0]


async def test_unfinished_bodies_are_bounded_together(budgets: list[BodyBudget]) -> None:
    service = FakeService()
    statuses: list[bytes] = []
    async with serving(http_app(service, HttpSettings(max_total_body_bytes=1_000_000))) as address:

        async def send(client: Raw) -> None:
            await client.send("/generate", b" " * 300_000, declared=400_000)
            head = await client.until(b"\r\n\r\n")
            statuses.append(head.split(b" ")[1])
            assert b"retry-after: " in head

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                client = await tasks.start(_connected, address)
                tasks.start_soon(send, client)
            await until(lambda: len(statuses) == 5)
            await until(lambda: budgets[0].num_bytes == 900_000)
            assert statuses == [b"503"] * 5
            async with Raw.connected(address) as small:  # there is room for others
                await small.send("/generate", GENERATE)
                assert (await small.until(b"\r\n")).startswith(b"HTTP/1.1 200 ")
            tasks.cancel_scope.cancel()
        await until(lambda: budgets[0].num_bytes == 0)
        assert budgets[0].peak_bytes <= 1_000_000
        async with Raw.connected(address) as client:
            await client.send("/generate", GENERATE + b" " * 500_000)
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    await until(lambda: budgets[0].num_bytes == 0)


async def _connected(address: tuple[str, int], *, task_status: anyio.abc.TaskStatus[Raw]) -> None:
    async with Raw.connected(address) as client:
        task_status.started(client)
        await anyio.sleep_forever()


async def test_a_body_counts_while_its_request_runs(budgets: list[BodyBudget]) -> None:
    service = FakeService(hold=True)
    async with (
        serving(http_app(service, HttpSettings(max_total_body_bytes=100))) as address,
        Raw.connected(address) as first,
        Raw.connected(address) as second,
    ):
        await first.send("/generate", GENERATE)
        await until(lambda: bool(service.running))
        assert budgets[0].num_bytes == len(GENERATE)
        await second.send("/generate", GENERATE)
        head = await second.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"connection: close" not in head
        service.run()
        assert (await first.until(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        await until(lambda: budgets[0].num_bytes == 0)


@pytest.mark.parametrize("path", PATHS[:4])
async def test_a_body_that_falls_silent_ends_with_408(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_PAUSE_S", 0.05)
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.send(path, b"{", declared=100)
        assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_trickles_ends_with_408(
    monkeypatch: pytest.MonkeyPatch, budgets: list[BodyBudget]
) -> None:
    """A byte now and then holds a place no longer than silence does, and a little for what has come."""
    monkeypatch.setattr(body, "MAX_PAUSE_S", 0.3)
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.send("/generate", b"{", declared=10_000)

        async def trickle() -> None:
            while True:
                await client.write(b" ")
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trickle)
            with anyio.fail_after(20):
                assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 408 ")
            tasks.cancel_scope.cancel()
    await until(lambda: budgets[0].num_bytes == 0)


async def test_unfinished_messages_of_sockets_count(budgets: list[BodyBudget]) -> None:
    part = b"\x01\xff" + (200_000).to_bytes(8) + bytes(4) + b" " * 200_000  # the first of a message
    async with serving(http_app(FakeService(), HttpSettings(max_total_body_bytes=250_000))) as address:
        async with Raw.connected(address) as one, Raw.connected(address) as two:
            await one.write(UPGRADE)
            await one.until(b"\r\n\r\n")
            await one.write(part)
            await until(lambda: budgets[0].num_bytes == 200_000)
            await two.write(UPGRADE)
            await two.until(b"\r\n\r\n")
            await two.write(part)
            await two.to_end()
            assert budgets[0].num_bytes == 200_000
        await until(lambda: budgets[0].num_bytes == 0)
    assert budgets[0].peak_bytes <= 250_000


async def test_messages_of_sockets_are_not_compressed() -> None:
    """A compressed message of some kilobytes is megabytes when it is read."""
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(UPGRADE[:-2] + b"sec-websocket-extensions: permessage-deflate\r\n\r\n")
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ") and b"extensions" not in head.lower()


FRAMING = [
    b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 0\r\n",
    b"content-length: 5\r\ntransfer-encoding: gzip, chunked\r\n",
    b"content-length: 5\r\ntransfer-encoding: identity\r\n",
    b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked, identity\r\n",
    b"transfer-encoding: xchunked\r\n",
    b"transfer-encoding : chunked\r\n",
    b"content-length: 5\r\ncontent-length: 6\r\n",
    b"content-length: 5, 6\r\n",
    b"content-length: +5\r\n",
    b"content-length: 0x5\r\n",
    b"content-length: 5\r\n content-length: 6\r\n",
]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("framing", FRAMING)
async def test_two_readings_of_a_length_close_the_connection(framing: bytes, version: bytes) -> None:
    """What a proxy before the server takes for the body must not be a request here (request smuggling)."""
    request = b"POST /tokenize HTTP/%b\r\nhost: t\r\nconnection: keep-alive\r\n%b\r\n" % (version, framing)
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(request + b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: t\r\n\r\n")
        answer = await client.to_end()
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer


@pytest.mark.parametrize("num_probes", [30])
async def test_probes_take_one_place_in_the_queue(num_probes: int) -> None:
    """/health_generate needs no key: however many ask, one token is generated for all of them."""
    service = FakeService(hold=True)
    answers: list[bytes] = []
    async with serving(http_app(service, HttpSettings(keys=Keys(("k",))))) as address:

        async def ask() -> None:
            async with Raw.connected(address) as client:
                await client.write(b"GET /health_generate HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
                answers.append(await client.to_end())

        async with anyio.create_task_group() as tasks:
            for _ in range(num_probes):
                tasks.start_soon(ask)
            await until(lambda: bool(service.running))
            await anyio.wait_all_tasks_blocked()
            for _ in range(num_probes):  # probes that came while the first one ran share the second
                assert len(service.running) <= 1
                service.run()
                await anyio.sleep(0.01)
    assert len(answers) == num_probes and all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert len(service.requests) < 4
    states = {json.loads(answer.partition(b"\r\n\r\n")[2])["state"] for answer in answers}
    assert states == {"ready"}


async def test_a_probe_whose_client_leaves_leaves_the_others_theirs() -> None:
    service = FakeService(hold=True)
    request = b"GET /health_generate HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
    async with serving(service) as address, Raw.connected(address) as second:
        async with Raw.connected(address) as first:
            await first.write(request)
            await until(lambda: bool(service.running))
            await second.write(request)
            await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        service.run()
        await until(lambda: bool(service.requests))
        answer = await second.to_end()
    assert answer.startswith(b"HTTP/1.1 200 ") and len(service.requests) <= 2


REQUESTS = {
    b"localhost": 200,
    b"LOCALHOST:30000": 200,
    b"localhost.": 200,
    b"127.0.0.1:30000": 200,
    b"[::1]:30000": 200,
    b"10.0.0.7": 200,
    b"llm.example": 200,
    b"rebound.example": 403,
    b"rebound.example:30000": 403,
    b"localhost.rebound.example": 403,
    b"127.0.0.1.rebound.example": 403,
    b"": 403,
    b"[::1": 403,
    b"[rebound.example]": 403,
    b"\xff\xfe": 403,
}


@pytest.mark.parametrize("host", REQUESTS)
async def test_requests_under_other_names_are_refused(host: bytes) -> None:
    """A web page that has its own name resolve to this machine (DNS rebinding) reads nothing."""
    app = http_app(FakeService(), HttpSettings(allowed_hosts=AllowedHosts(("localhost", "llm.example"))))
    for path, is_socket in ((b"/health", False), (b"/v1/models", False), (b"/v1/ws", True)):
        async with serving(app) as address, Raw.connected(address) as client:
            more = b""
            if is_socket:
                more = b"upgrade: websocket\r\nconnection: Upgrade\r\norigin: http://%b\r\n" % host
                more += b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            await client.write(b"GET %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (path, host, more))
            status = int((await client.until(b"\r\n")).split(b" ")[1])
            assert status == (101 if is_socket and REQUESTS[host] == 200 else REQUESTS[host])
