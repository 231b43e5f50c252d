"""Links over real sockets: messages, room, heartbeats, and what strangers send."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from runtime.nodes import link as link_module
from runtime.nodes.handshake import ClientHandshake, ServerHandshake
from runtime.nodes.link import Link

pytestmark = pytest.mark.anyio
SECRET = b"s" * 32
PATIENCE_S = 30.0  # only a failing test waits for so long


class End:
    """One end of a link, and what has happened there."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.messages: list[bytes] = []
        self.lost: list[str] = []
        self.is_open = False
        link.on_open, link.on_message, link.on_lost = self._open, self.messages.append, self.lost.append

    def _open(self) -> None:
        self.is_open = True


async def until(holds: Callable[[], object]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not holds():
            await anyio.sleep(0.005)


@asynccontextmanager
async def listening(ends: list[End]) -> AsyncIterator[int]:
    """A port that makes an End for each connection."""

    def accept() -> Link:
        ends.append(End(Link(ServerHandshake(SECRET))))
        return ends[-1].link

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def connect(port: int, secret: bytes = SECRET) -> End:
    end = End(Link(ClientHandshake(secret)))
    await asyncio.get_running_loop().create_connection(lambda: end.link, "127.0.0.1", port)
    return end


async def test_messages_go_both_ways_in_order() -> None:
    servers: list[End] = []
    async with listening(servers) as port:
        client = await connect(port)
        await until(lambda: client.is_open and servers[0].is_open)
        sent = [bytes([n]) * (n * 40_000 + 1) for n in range(40)]
        for message in sent:
            client.link.send(message)
            servers[0].link.send(message)
        await until(lambda: len(client.messages) == len(servers[0].messages) == 40)
        assert client.messages == servers[0].messages == sent
        client.link.close("enough")
        await until(lambda: servers[0].lost)
        assert client.lost == ["enough"] and servers[0].lost == ["the connection was closed"]


async def test_a_reader_that_pauses_takes_the_room_and_resuming_gives_it_back() -> None:
    servers: list[End] = []
    async with listening(servers) as port:
        client = await connect(port)
        await until(lambda: client.is_open and servers[0].is_open)
        rooms: list[int] = []
        client.link.on_room = lambda: rooms.append(len(servers[0].messages))
        servers[0].link.pause()
        count = 0
        while client.link.has_room:
            client.link.send(bytes(1 << 20))
            count += 1
            await anyio.sleep(0)
            assert count < 200, "buffers have a bound"
        servers[0].link.resume()
        await until(lambda: len(servers[0].messages) == count)
        assert rooms and client.link.has_room
        client.link.abort("")


async def test_a_silent_side_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(link_module, "LOST_S", 1.5)
    servers: list[End] = []
    async with listening(servers) as port:
        client = await connect(port)
        await until(lambda: client.is_open and servers[0].is_open)
        await anyio.sleep(2)
        assert not client.lost and not servers[0].lost, "heartbeats count"
        monkeypatch.setattr(client.link, "send", lambda message: None)
        await until(lambda: servers[0].lost)
        assert servers[0].lost == ["nothing came from it for 1.5 s"]


async def test_a_wrong_secret_is_named_on_both_sides() -> None:
    servers: list[End] = []
    async with listening(servers) as port:
        client = await connect(port, b"t" * 32)
        await until(lambda: client.lost and servers[0].lost)
        assert client.lost == servers[0].lost == ["its secret is another one"]
        assert not client.is_open and not servers[0].is_open


async def test_a_slow_handshake_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.1)
    servers: list[End] = []
    async with listening(servers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"runt")
        with anyio.fail_after(PATIENCE_S):
            await reader.read()  # to its end
        assert servers[0].lost == ["it did not prove its secret within 0.1 s"]
        writer.close()


async def test_messages_before_the_proof_reach_no_one() -> None:
    servers: list[End] = []
    async with listening(servers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        greeting = await reader.readexactly(40)
        writer.write(greeting + bytes(32) + b"\0\0\0\1\0x" + bytes(16))
        with anyio.fail_after(PATIENCE_S):
            assert await reader.read() == bytes(32), "zeros, and the end"
        assert servers[0].messages == [] and not servers[0].is_open
        writer.close()
