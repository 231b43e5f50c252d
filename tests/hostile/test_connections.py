"""Clients that connect and send nothing: health checks are answered, others are told so, files remain for
ranks, and the accept loop does not spin."""

import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from runtime.http import acceptor, server
from runtime.http.acceptor import NUM_SPARE, ConnectionLimit
from runtime.http.server import tls_context
from tests.http.fake import FakeService
from tests.http.serving import Raw, serving
from tests.http.test_tls import certificate, key_of  # noqa: F401 - a fixture

pytestmark = pytest.mark.anyio

LIMIT = 20


def get(path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: t\r\n{more}\r\n".encode()


@asynccontextmanager
async def crowd(address: tuple[str, int], count: int) -> AsyncIterator[list[Raw]]:
    """So many clients that are connected and known to the server, and send nothing more."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            client = await stack.enter_async_context(Raw.connected(address))
            await client.write(get("/health"))
            await client.until(b"\r\n\r\n")
            clients.append(client)
        yield clients


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[ConnectionLimit]:
    """The limit of the server that the test starts."""
    made: list[ConnectionLimit] = []

    def make(count: int) -> ConnectionLimit:
        made.append(ConnectionLimit(count))
        return made[-1]

    monkeypatch.setattr(server, "ConnectionLimit", make)
    return made


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


async def test_health_checks_are_answered_above_the_limit() -> None:
    service = FakeService()
    async with serving(service, max_connections=LIMIT) as address, crowd(address, LIMIT):
        for path, status in (
            ("/health", 200),
            ("/metrics", 200),
            ("/health_generate", 200),
            ("/v1/models", 503),
        ):
            async with Raw.connected(address) as client:
                await client.write(get(path))
                answer = await client.to_end()
                assert answer.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in answer
                if status == 503:
                    assert b"retry-after: " in answer and b"--max-connections" in answer
        async with Raw.connected(address) as client:
            await client.send("/generate", b" " * 100_000, declared=1_000_000)
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 503 ")
        async with Raw.connected(address) as client:
            upgrade = "upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\n"
            await client.write(get("/v1/ws", upgrade + "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"))
            assert (await client.to_end()).startswith(b"HTTP/1.1 503 ")
    assert len(service.requests) == 1


async def test_there_is_room_again_when_clients_leave(limits: list[ConnectionLimit]) -> None:
    async with serving(FakeService(), max_connections=LIMIT) as address:
        for _ in range(3):
            async with crowd(address, LIMIT), Raw.connected(address) as client:
                await client.write(get("/v1/models"))
                assert (await client.to_end()).startswith(b"HTTP/1.1 503 ")
            await until(lambda: limits[0].num_open == 0)
        async with crowd(address, LIMIT) as clients:
            await clients[-1].until(b"}")
            await clients[-1].write(get("/v1/models"))
            assert (await clients[-1].until(b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_clients_above_the_spare_ones_are_closed_at_once(
    limits: list[ConnectionLimit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SPARE_IDLE_S", 0.3)
    async with serving(FakeService(), max_connections=LIMIT) as address, crowd(address, LIMIT):
        async with AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(Raw.connected(address)) for _ in range(NUM_SPARE + 30)]
            await until(lambda: limits[0].num_refused >= 30)
            assert limits[0].num_open <= LIMIT + NUM_SPARE
            answers = [await client.to_end() for client in idle]  # spare ones may not wait long
            assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) >= 30
        await until(lambda: limits[0].num_open == LIMIT)
        async with Raw.connected(address) as client:
            await client.write(get("/health"))
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    await until(lambda: limits[0].num_open == 0)


async def test_handshakes_that_never_end_count(
    certificate: Path,  # noqa: F811
    limits: list[ConnectionLimit],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.5)
    tls = tls_context(str(certificate), key_of(certificate), None, None)
    async with serving(FakeService(), tls=tls, max_connections=2) as address, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(Raw.connected(address)) for _ in range(NUM_SPARE + 10)]
        await until(lambda: limits[0].num_refused == 8)
        assert limits[0].num_open == NUM_SPARE + 2
        await until(lambda: limits[0].num_open == 0)
        for client in silent:
            assert await client.to_end() in (b"", b"<reset>")
        for _ in range(3):  # what is no TLS ends at once, and counts no longer
            async with Raw.connected(address) as client:
                await client.write(get("/health"))
                await client.to_end()
        await until(lambda: limits[0].num_open == 0)


async def test_a_server_ends_while_clients_shake_hands(
    certificate: Path,  # noqa: F811
    limits: list[ConnectionLimit],
) -> None:
    tls = tls_context(str(certificate), key_of(certificate), None, None)
    with anyio.fail_after(acceptor.HANDSHAKE_S - 2):
        async with AsyncExitStack() as stack, serving(FakeService(), tls=tls, grace_s=0.1) as address:
            for _ in range(5):
                await stack.enter_async_context(Raw.connected(address))
            await until(lambda: limits[0].num_open == 5)


@pytest.fixture
def few_files() -> Iterator[int]:
    """A process that may open few files more. -> their number"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, hard))
    yield 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_files_the_accept_loop_waits(few_files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is there so that this does not happen; if it does, the server goes on."""
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.02)
    naps: list[float] = []
    sleep = acceptor.asyncio.sleep

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        await sleep(seconds)

    async with serving(FakeService()) as address, Raw.connected(address) as first:
        await first.write(get("/health"))
        await first.until(b"}")
        monkeypatch.setattr(acceptor.asyncio, "sleep", nap)
        held: list[int] = []
        second = socket.socket()
        try:
            with pytest.raises(OSError) as caught:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            assert caught.value.errno == errno.EMFILE
            second.setblocking(False)
            second.connect_ex(address)
            await until(lambda: naps.count(0.02) >= 3)  # it tries, and pauses in between
            await first.write(get("/health"))  # clients that are connected are served
            await first.until(b"}")
        finally:
            for file in held:
                os.close(file)
        await until(lambda: 0 in naps)  # accepted
        client = Raw(second)
        await client.write(get("/health"))
        await client.until(b"}")
        second.close()
