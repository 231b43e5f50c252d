"""The port at which nodes meet: what strangers send there harms nothing, and no other address has it."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from runtime import Engine
from runtime.actors.nodes import MAX_STRANGERS
from runtime.messages.codec import Wire
from runtime.messages.nodes import Bye, Exited, FromNode, FromNodeRank, Hello, Identity
from runtime.nodes.handshake import MAGIC, ClientHandshake
from runtime.nodes.link import Link
from runtime.nodes.records import MAX_RECORD_BYTES
from tests.e2e.node_of import NULL, SECRET, options_of, two_nodes, until

pytestmark = pytest.mark.anyio
HOST = "127.0.0.3"
LISTENS = "0A"  # proc(5): the state of a socket


@pytest.fixture(autouse=True)
def _children(forked_children: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RUNTIME_DIST_SECRET", SECRET.decode())
    yield


@pytest.fixture
async def server() -> AsyncIterator[tuple[Engine, int]]:
    """An engine of two nodes, and the port of node 0."""
    options = options_of(HOST, **NULL)
    async with two_nodes(options) as (engine, node):
        yield engine, int(options["dist_init_addr"].split(":")[1])
        assert node.is_here
        found = await engine.generate([1, 2], max_new_tokens=5, ignore_eos=True, seed=0)
        assert found.token_ids == [99, 100, 101, 102, 103]
        assert engine._core.replicas[0].supervisor.generation == 1, "no rank was lost"


async def answer(port: int, data: bytes) -> bytes:
    """What node 0 sends before it ends the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    with anyio.fail_after(30):
        found = b""
        try:
            while part := await reader.read(1 << 16):
                found += part
        except ConnectionError:
            pass
    writer.close()
    return found


async def test_strangers_learn_a_nonce_and_no_more(server: tuple[Engine, int]) -> None:
    _, port = server
    fuzz = random.Random(0)
    cases = [
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + bytes(500),
        MAGIC + bytes(64),
        MAGIC + bytes(64) + b"\xff" * 100_000,
        *(fuzz.randbytes(fuzz.choice((72, 1000, 200_000))) for _ in range(10)),
        *(MAGIC + fuzz.randbytes(64 + fuzz.randrange(5000)) for _ in range(10)),
    ]
    for data in cases:
        found = await answer(port, data)
        assert found[: len(MAGIC)] == MAGIC and len(found) in (40, 72) and not any(found[40:])


async def test_many_silent_connections_leave_room_for_a_node(server: tuple[Engine, int]) -> None:
    engine, port = server
    silent = [await asyncio.open_connection(HOST, port) for _ in range(3 * MAX_STRANGERS)]
    nodes = engine._core._nodes
    assert nodes is not None
    await until(lambda: len(nodes._strangers) <= MAX_STRANGERS)
    link = Link(ClientHandshake(SECRET))
    opened = asyncio.Event()
    link.on_open = opened.set
    await asyncio.get_running_loop().create_connection(lambda: link, HOST, port)
    with anyio.fail_after(30):
        await opened.wait()
    link.abort("")
    for _, writer in silent:
        writer.close()


async def test_what_was_recorded_of_a_node_opens_nothing(server: tuple[Engine, int]) -> None:
    """A whole session of a node with the secret, sent again."""
    _, port = server
    sent = bytearray()
    handshake = ClientHandshake(SECRET)
    reader, writer = await asyncio.open_connection(HOST, port)
    hello = handshake.receive(bytearray(await reader.readexactly(40)))
    sent += hello
    writer.write(hello)
    handshake.receive(bytearray(await reader.readexactly(32)))
    assert handshake.keys is not None
    writer.close()
    found = await answer(port, bytes(sent) + os.urandom(500))
    assert len(found) == 72 and not any(found[40:])


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, Identity("0", "little", 2, "null", {}, "")),
        Hello(-1, Identity("0", "little", 2, "null", {}, "")),
        FromNodeRank(1, 1, bytearray(b"\xff" * 64)),
        Exited(1, 1, 0),
        Bye(True),
        None,
    ],
    ids=lambda message: type(message).__name__,
)
async def test_a_peer_with_the_secret_that_is_no_node_harms_no_rank(
    server: tuple[Engine, int], message: FromNode | None
) -> None:
    _, port = server
    link, lost = Link(ClientHandshake(SECRET)), asyncio.Event()
    body = b"\xff" * 100 if message is None else Wire[FromNode](FromNode).encode(message)
    link.on_open = lambda: link.send(body)
    link.on_lost = lambda reason: lost.set()
    await asyncio.get_running_loop().create_connection(lambda: link, HOST, port)
    with anyio.fail_after(30):
        await lost.wait()


async def test_an_oversized_record_ends_the_connection(server: tuple[Engine, int]) -> None:
    _, port = server
    handshake = ClientHandshake(SECRET)
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(handshake.receive(bytearray(await reader.readexactly(40))))
    handshake.receive(bytearray(await reader.readexactly(32)))
    writer.write((MAX_RECORD_BYTES + 1).to_bytes(4, "big") + b"\0")
    with anyio.fail_after(30):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
    writer.close()


async def test_the_port_is_on_the_address_that_was_given_alone(server: tuple[Engine, int]) -> None:
    _, port = server
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, number = fields[1].split(":")
            if fields[3] == LISTENS and int(number, 16) == port:
                found.append(bytes.fromhex(address)[::-1])
    assert found == [bytes([127, 0, 0, 3])]
