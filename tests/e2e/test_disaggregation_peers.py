"""The other server dies, stalls or lies, at every stage: prompts are computed here, and nothing is held."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import CapacityLimiter
from msgspec import Struct, structs
from msgspec.msgpack import Decoder

import runtime
from runtime.cache.audit import findings
from runtime.messages.transfer import (
    Ask,
    Dropped,
    End,
    First,
    Found,
    Held,
    Memory,
    PageLayout,
    Pages,
    PagesAt,
    Parts,
    PartsAt,
    RankMemory,
    Section,
    State,
    Sum,
    Taken,
    ToDecode,
    Transfer,
    Waiting,
)
from runtime.transfer.key import link_key
from runtime.transfer.transports import shared_name
from runtime.transfer.wire import Wire, accept, connect, connect_local
from tests.e2e.conftest import Generate
from tests.e2e.disaggregated import COUNT, FULL, KEY, PROMPT, counts, key_options, server, source_of

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]
Play = Callable[[Wire, PageLayout], Awaitable[None]]
ANSWERS: Decoder[Any] = Decoder(ToDecode)
FOREVER = 60.0


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return key_options(tmp_path, KEY)


def says(*messages: Struct) -> Play:
    """Finds the room, and sends these."""

    async def play(wire: Wire, layout: PageLayout) -> None:
        for message in (Found(layout), *messages):
            await wire.send(message)

    return play


def then(play: Play, seconds: float) -> Play:
    """Plays, and is silent for some time."""

    async def both(wire: Wire, layout: PageLayout) -> None:
        await play(wire, layout)
        await anyio.sleep(seconds)

    return both


def bytes_behind(size: Callable[[PageLayout], int], *, is_whole: bool = False) -> Play:
    """Announces two pages, and sends so many bytes; whole pages have checksums that are wrong."""

    async def play(wire: Wire, layout: PageLayout) -> None:
        view = memoryview(bytes(size(layout)))
        await wire.send(Found(layout))
        if is_whole:
            await wire.send(Pages(2))
            wire._write([view])
            await wire.send(Sum(1))
        else:
            await wire.send(Pages(2))
            wire._write([view])

    return play


def section_behind(*messages: Struct) -> Play:
    """Sends the first part of two pages, and these."""

    async def play(wire: Wire, layout: PageLayout) -> None:
        await wire.send(Found(layout))
        view = memoryview(bytes(2 * layout.num_ranks * layout.parts[0][0]))
        await wire.send_pages(Parts(2, Section(0, 0, 1)), [view])
        for message in messages:
            await wire.send(message)

    return play


async def nothing(wire: Wire, layout: PageLayout) -> None:
    """After the question, nothing."""


async def other_layout(wire: Wire, layout: PageLayout) -> None:
    await wire.send(Found(structs.replace(layout, parts=((1, 1),))))


async def memory_of_others(wire: Wire, layout: PageLayout) -> None:
    ranks = tuple(RankMemory(4, parts, "page_first", 4096) for parts in layout.parts)
    await wire.send(Found(layout, Memory(b"somewhere", ranks)))


PLAYS: dict[str, Play] = {
    "dies after the question": nothing,
    "dies with the room found": says(),
    "dies while it waits": says(Waiting(), Waiting()),
    "dies within a page": bytes_behind(lambda layout: layout.page_bytes // 2),
    "dies before checksums": bytes_behind(lambda layout: 2 * layout.page_bytes),
    "damages a page": bytes_behind(lambda layout: 2 * layout.page_bytes, is_whole=True),
    "sends nothing": says(End()),
    "stalls after the question": then(nothing, FOREVER),
    "stalls with the room found": then(says(), FOREVER),
    "stalls within a page": then(bytes_behind(lambda layout: layout.page_bytes // 2), FOREVER),
    "sends no pages": says(Pages(0)),
    "sends more than was asked for": says(Pages(1000)),
    "sends less than nothing": says(Pages(-1)),
    "sends a state": says(State(3)),
    "dies between sections": section_behind(),
    "stalls between sections": then(section_behind(Waiting()), FOREVER),
    "drops a section": section_behind(Dropped(), End()),
    "drops what it did not send": says(Dropped()),
    "sends whole pages behind a section": section_behind(Pages(2)),
    "sends a section again": section_behind(Parts(2, Section(0, 0, 1))),
    "sends a section of other pages": section_behind(Parts(1, Section(0, 1, 2))),
    "sends a section of no stage": says(Parts(1, Section(7, 0, 1))),
    "sends an empty section": says(Parts(1, Section(0, 0, 0))),
    "sends a section of too many parts": says(Parts(1, Section(0, 0, 1000))),
    "sends a section of too many pages": says(Parts(1000, Section(0, 0, 1))),
    "names places of a section": says(PartsAt((1,), Section(0, 0, 1))),
    "samples what is no token": says(First(1 << 30)),
    "samples less than nothing": says(Waiting(), First(-1)),
    "names places of no memory": says(PagesAt((1, 2))),
    "holds what it did not offer": says(Held()),
    "has another layout": other_layout,
    "offers memory that was not asked for": memory_of_others,
}


@asynccontextmanager
async def peer(play: Play, layout: PageLayout) -> AsyncIterator[int]:
    """A server that plays. -> its port"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        async def serve() -> None:
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                connection.setblocking(False)
                try:
                    wire = await accept(connection, link_key(KEY), CapacityLimiter(2))
                    await wire.receive(Decoder(Ask))
                    await play(wire, layout)
                finally:
                    # as the kernel ends connections of a process that was killed with bytes to be read
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            yield listener.getsockname()[1]
            tasks.cancel_scope.cancel()


def is_clean(engine: runtime.Engine) -> bool:
    """Whether nothing is pinned, reserved or lost."""
    scheduler = engine._core.replicas[0].scheduler
    assert scheduler is not None
    found = findings(scheduler.cache)
    assert found.is_clean, found.messages
    return not found.busy


async def test_prefill_servers_that_die_stall_or_lie(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wire.receive, "__defaults__", (0.3,))
    monkeypatch.setattr("runtime.transfer.wire.STALL_S", 0.3)
    async with server("decode", checkpoint("llama"), **options) as (engine, decode):
        pages = engine._core.replicas[0].pages
        assert pages is not None
        for number, (name, play) in enumerate(PLAYS.items()):
            prompt = [number, *PROMPT]
            async with peer(play, pages._pages.layout) as port:
                answer = await decode(prompt, Transfer(number, f"127.0.0.1:{port}"))
            assert answer == (reference("llama", prompt, COUNT), 0), name
            assert counts(engine).failures == number + 1, name
            assert is_clean(engine), name
        load = engine.load()
        assert load.running == load.waiting == 0


@pytest.mark.parametrize("backend", ["tcp", "shm"])
async def test_decode_servers_that_die_or_stall(
    backend: str, checkpoint: Checkpoint, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each stage: pages are free again, and the next one gets them."""
    monkeypatch.setattr("runtime.transfer.service.TAKE_S", 0.2)
    monkeypatch.setattr("runtime.transfer.service.PORTION_BYTES", 1)
    options["disaggregation_transfer_backend"] = backend
    async with server("prefill", checkpoint("llama"), **options) as (engine, ask):
        await ask(PROMPT, Transfer(1))
        pages, halves = engine._core.replicas[0].pages, engine._core._halves
        assert pages is not None and halves is not None
        scheduler = engine._core.replicas[0].scheduler
        assert scheduler is not None
        room = halves.rooms.find(1)
        assert room is not None
        sequence, tree = room.sequence, scheduler.cache.tree
        depths = range(1, FULL // 16 + 1)
        nodes = [tree.probe(None, sequence.request.namespace, sequence.tokens, depth) for depth in depths]
        keys = b"".join(pages._connector.key(node) for node in nodes)
        question = Ask(1, pages._identity, 0, keys, 0, backend)
        port = int(source_of(engine).rpartition(":")[2])

        async def open_wire() -> Wire:
            wire = await connect_local(shared_name(port), link_key(KEY), CapacityLimiter(2))
            return wire or await connect("127.0.0.1", port, link_key(KEY), CapacityLimiter(2))

        for num_messages in range(4 if backend == "tcp" else 3):  # shm: the next one comes behind Taken
            wire = await open_wire()
            await wire.send(question)
            for _ in range(num_messages):
                answer = await wire.receive(ANSWERS)
                if isinstance(answer, Found) and answer.memory is not None:
                    for fd in await wire.receive_files(1):
                        os.close(fd)
                if isinstance(answer, Pages):
                    page = memoryview(bytearray(pages._pages.layout.page_bytes))
                    await wire.receive_pages([page])
            if num_messages == 2:
                await anyio.sleep(0.5)  # and stalls
            wire.close()
            with anyio.fail_after(60):
                while not is_clean(engine) or halves.service.sent.connections:
                    await anyio.sleep(0.02)
        wire = await open_wire()
        await wire.send(structs.replace(question, identity=b"another"))
        assert "another model" in (await wire.receive(ANSWERS)).reason
        await wire.send(Taken())  # where a question is due
        with anyio.fail_after(60):
            while halves.service.sent.connections:
                await anyio.sleep(0.02)
        wire.close()
