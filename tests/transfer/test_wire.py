"""Two ends of a connection, and what one end does when the other one lies, stops or is no server at all."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio import CapacityLimiter
from msgspec.msgpack import Decoder

from runtime.errors import LinkError
from runtime.messages.transfer import End, Pages, Sum, ToDecode, Waiting
from runtime.transfer import wire as wire_module
from runtime.transfer.wire import CALL_BYTES, MAX_BUFFERS, Wire, accept, calls, connect

pytestmark = pytest.mark.anyio

KEY = b"0123456789abcdef"
HALF = [memoryview(b"half")]
ANSWERS: Decoder[Any] = Decoder(ToDecode)


@asynccontextmanager
async def ends(key: bytes = KEY) -> AsyncIterator[tuple[Wire, Wire]]:
    """-> the ends of a client and of a server"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepted: list[Wire] = []

        async def take() -> None:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            connection.setblocking(False)
            try:
                accepted.append(await accept(connection, KEY, CapacityLimiter(2)))
            except LinkError:
                connection.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            client = await connect("127.0.0.1", listener.getsockname()[1], key, CapacityLimiter(2))
        yield client, accepted[0]
        client.close()
        accepted[0].close()


def records(*sizes: int) -> list[memoryview]:
    """Random ones."""
    return [memoryview(bytearray(os.urandom(size))) for size in sizes]


def test_a_call_has_what_the_kernel_takes() -> None:
    sizes = [7] * 1000 + [0, 3 * CALL_BYTES + 1, 5]
    views = records(*sizes)
    found = list(calls(views))
    assert b"".join(view for call in found for view in call) == b"".join(views)
    assert all(0 < sum(map(len, call)) <= CALL_BYTES and len(call) <= MAX_BUFFERS for call in found)
    assert len(found) == 5


async def test_messages_and_pages_in_turn() -> None:
    pages, room = records(1, 3_000_000, 17), records(1, 3_000_000, 17)
    async with ends() as (client, server):
        await server.send(Waiting())
        assert isinstance(await client.receive(ANSWERS), Waiting)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.send_pages, Pages(3), pages)
            assert (await client.receive(ANSWERS)).count == 3
            await client.receive_pages(room)
        assert room == pages
        await server.send(End())
        assert isinstance(await client.receive(ANSWERS), End)


async def test_what_came_damaged_is_an_error() -> None:
    page = records(8192)[0]
    async with ends() as (client, server):
        await server.send(Pages(1))
        await client.receive(ANSWERS)
        server._write([page])
        await server.send(Sum(1))
        with pytest.raises(LinkError, match="damaged"):
            await client.receive_pages(records(8192))


async def test_another_key_is_refused() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with ends(KEY[::-1]):
            pass
    assert "secret" in str(caught.value.exceptions[0])


async def test_what_stops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "STALL_S", 0.2)
    async with ends() as (client, server):
        with pytest.raises(LinkError, match="nothing came"):
            await client.receive(ANSWERS, 0.05)
    async with ends() as (client, server):
        await server.send_pages(Pages(1), HALF)
        await client.receive(ANSWERS)
        with pytest.raises(LinkError, match="no byte moved"):
            await client.receive_pages(records(4 + 4096))
    async with ends() as (client, server):
        with pytest.raises(LinkError, match="no byte moved"):  # by a client that reads nothing
            await server.send_pages(Pages(1), records(64 << 20))


async def test_what_ends_is_an_error() -> None:
    async with ends() as (client, server):
        server.close()
        with pytest.raises(LinkError, match="closed"):
            await client.receive(ANSWERS)
    async with ends() as (client, server):
        await server.send_pages(Pages(1), HALF)
        server.close()
        await client.receive(ANSWERS)
        with pytest.raises(LinkError, match="closed|broke"):
            await client.receive_pages(records(4 + 4096))


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff\0", b"\0\0\0\1\0" + b"x" * 17, b"\0\0\0\1\7" + b"x" * 17],
    ids=["long", "forged", "kind"],
)
async def test_what_is_no_record_is_an_error(data: bytes) -> None:
    async with ends() as (client, server):
        server._socket.send(data)
        with pytest.raises(LinkError, match="record"):
            await client.receive(ANSWERS)


async def test_a_message_of_another_kind_is_an_error() -> None:
    async with ends() as (client, server):
        await server.send(End())
        with pytest.raises(LinkError, match="no message"):
            await client.receive(Decoder(Pages))


async def test_no_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(wire_module, "CONNECT_S", 0.1)
        with pytest.raises(LinkError, match="did not answer"):
            await connect("127.0.0.1", port, KEY, CapacityLimiter(2))
    with pytest.raises(LinkError, match="no connection"):
        await connect("127.0.0.1", port, KEY, CapacityLimiter(2))


async def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of localhost, where a server listens at one of two."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nowhere = gone.getsockname()
    tcp = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        there = listener.getsockname()

        async def addresses(*_: Any, **__: Any) -> list[Any]:
            return [(*tcp, nowhere), (*tcp, there)]

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(wire_module.asyncio, "get_running_loop", lambda: Loop(loop, addresses))
        ends: list[Wire] = []

        async def take() -> None:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            ends.append(await accept(connection, KEY, CapacityLimiter(2)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            ends.append(await connect("name", 1, KEY, CapacityLimiter(2)))
        for end in ends:
            end.close()


class Loop:
    """An event loop that finds other addresses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, getaddrinfo: Any) -> None:
        self._loop = loop
        self.getaddrinfo = getaddrinfo

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
