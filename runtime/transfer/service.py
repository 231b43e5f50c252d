"""The side of a server that computes prompts: answers those that ask for pages (messages/transfer.py).

Each connection is a task. It answers one question after the other, and pages leave in the order of the
prompt, in portions, as soon as they are in host memory: while later parts of a long prompt are computed, the
earlier ones are on their way, and while the later layers of a step are, its earlier ones.
"""

import socket
from functools import partial
from itertools import accumulate
from time import monotonic

import anyio
from anyio import CapacityLimiter
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct
from msgspec.msgpack import Decoder

from runtime import log
from runtime.cache.storage_connector import KEY_BYTES, Pin, StatePin
from runtime.errors import LinkError
from runtime.messages.transfer import (
    Ask,
    Dropped,
    End,
    Found,
    Held,
    Memory,
    Pages,
    PagesAt,
    Parts,
    PartsAt,
    Refused,
    Section,
    State,
    StateAt,
    Taken,
    Waiting,
)
from runtime.transfer.layout import RankPages
from runtime.transfer.listening import MAX_CONNECTIONS, accept_connections, listen, listen_locally
from runtime.transfer.rooms import Reader, Room, Rooms, Saving
from runtime.transfer.transports import TCP, Transport
from runtime.transfer.wire import MOVES, Wire, accept

LOG = log.get("transfer")
IDLE_S = 600.0  # without a question, after which a connection ends; a decode server makes another one
BEAT_S = 2.0  # between two notices that pages are still to come
TAKE_S = 60.0  # within which the other side must have read what lies in memory
ROOM_S = 10.0  # within which the request of a room must come, once it was asked for
PORTION_BYTES = 16 << 20  # of pages behind one message
QUESTIONS = Decoder(Ask)
TAKEN = Decoder(Taken)
OTHER_MODEL = "it has another model, other weights, or other options that decide about keys and values"


class Sent(Struct):
    """Counts since the start."""

    pages: int = 0
    bytes: int = 0
    refused: int = 0
    connections: int = 0  # that are open now


class PageService:
    """Listens, and sends pages of `rooms`."""

    def __init__(self, rooms: Rooms, key: bytes, transport: Transport | None = None) -> None:
        """`transport`: by which others may read host memory; None: bytes are sent."""
        self.rooms = rooms
        self._transport = transport
        self.identity = b""  # set before the first room opens
        self.sent = Sent()
        self._key = key
        self._threads = CapacityLimiter(MOVES)

    async def run(self, host: str, port: int, *, task_status: TaskStatus[int]) -> None:
        """Serves until cancelled; reports the port. Raises StartError."""
        listener = listen(host, port)
        number = listener.getsockname()[1]
        listeners = [listener]
        try:
            if self._transport is not None and (name := self._transport.local_name(number)):
                listeners.append(listen_locally(name))
            task_status.started(number)
            async with anyio.create_task_group() as tasks:
                for one in listeners:
                    tasks.start_soon(accept_connections, one, partial(self._begin, tasks))
        finally:
            for one in listeners:
                one.close()

    def _begin(self, tasks: TaskGroup, connection: socket.socket, peer: str) -> None:
        if self.sent.connections >= MAX_CONNECTIONS:
            connection.close()
            return
        self.sent.connections += 1
        tasks.start_soon(self._serve, connection, peer)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            wire = await accept(connection, self._key, self._threads)
            while True:
                await self._answer(wire, await wire.receive(QUESTIONS, IDLE_S))
        except (LinkError, OSError) as error:
            LOG.debug("a connection for pages ended", peer=peer, reason=str(error))
        finally:
            connection.close()
            self.sent.connections -= 1

    async def _answer(self, wire: Wire, ask: Ask) -> None:
        room = await self._find(wire, ask.room)
        if room is None or ask.identity != self.identity:
            self.sent.refused += 1
            await wire.send(Refused("its request did not come" if room is None else OTHER_MODEL))
            return
        memory = self._memory(wire, room, ask)
        await wire.send(Found(room.pages.layout, memory))
        if memory is not None and not memory.name:
            await wire.send_files(room.pages.fds)
        out = _Out(wire, room.pages, is_read=memory is not None)
        beat, reader = _Beat(wire, self.rooms), Reader(room, ask.first, ask.keys)
        first = _FirstToken(wire, room) if ask.wants_first else None
        end = await self._send_pages(out, ask, reader, beat, first)
        while reader.is_state_coming(end):
            await beat.wait()
        if (found := reader.state(end)) is not None:
            await out.state(*found)
        await wire.send(End())

    def _memory(self, wire: Wire, room: Room, ask: Ask) -> Memory | None:
        """Where the other side reads; None: it is sent the bytes."""
        transport = self._transport
        if transport is None or ask.transport == TCP or ask.transport != transport.name:
            return None
        if not transport.server_name and not (wire.is_local and room.pages.fds):
            return None  # descriptors cannot be passed
        return room.pages.memory(transport.server_name)

    async def _send_pages(
        self, out: "_Out", ask: Ask, reader: Reader, beat: "_Beat", first: "_FirstToken | None"
    ) -> int:
        """Sends pages as they become ready, and the first token of the answer. -> how many of the pages that
        were asked for are on the other side"""
        portion = max(1, PORTION_BYTES // out.page_bytes)
        position = ask.num_there
        while position < len(ask.keys) // KEY_BYTES:
            if first is not None:
                await first.send()
            count = 0
            if pins := reader.ready(position, portion):
                await out.pages(pins)
                count = len(pins)
            elif (saving := reader.saving(position)) is not None:
                if await _send_sections(out, saving, beat, first):
                    count = len(saving.pins)
            elif reader.is_coming(position):
                await beat.wait()
            else:
                break
            position += count
            self.sent.pages += count
            self.sent.bytes += count * out.page_bytes
        if first is not None:
            await first.send()
        return position

    async def _find(self, wire: Wire, number: int) -> Room | None:
        """The room, for which the other half of the request may still be on its way."""
        deadline = monotonic() + ROOM_S
        while (room := self.rooms.find(number)) is None and (left_s := deadline - monotonic()) > 0:
            if self.rooms.is_refused(number):
                return None
            if not await self.rooms.changed(min(left_s, BEAT_S)):
                await wire.send(Waiting())
        return room


class _Out:
    """Pages and states on their way to one server: their bytes are sent, or it reads them."""

    def __init__(self, wire: Wire, pages: RankPages, *, is_read: bool) -> None:
        self.page_bytes = pages.layout.page_bytes
        self.stages = pages.layout.parts
        self._num_ranks = pages.layout.num_ranks
        self._wire, self._pages, self._is_read = wire, pages, is_read

    async def pages(self, pins: list[Pin]) -> None:
        """Returns when the pages, which are pinned until then, are with the other side. Raises LinkError."""
        try:
            if self._is_read:
                await self._wire.send(PagesAt(tuple(pin.host for pin in pins)))
                await self._hold()
            else:
                hosts = [pin.host for pin in pins]
                await self._wire.send_pages(Pages(len(pins)), self._pages.views(hosts))
        finally:
            for pin in pins:
                pin.release()

    def next_section(self, stage: int, first: int, end: int, count: int) -> Section:
        """The parts from `first` to `end`, of `count` pages, that go into one message: one at least."""
        sums = accumulate(size * self._num_ranks * count for size in self.stages[stage][first:end])
        num_parts = sum(num_bytes <= PORTION_BYTES for num_bytes in sums)
        return Section(stage, first, first + max(1, num_parts))

    async def section(self, pins: list[Pin], section: Section) -> None:
        """Sends a section of pages, or where it lies, and leaves them pinned. Raises LinkError."""
        hosts = [pin.host for pin in pins]
        if self._is_read:
            await self._wire.send(PartsAt(tuple(hosts), section))
            await self._hold()
        else:
            await self._wire.send_pages(Parts(len(hosts), section), self._pages.views(hosts, section))

    async def drop(self) -> None:
        """The pages of the last sections will not be whole. Raises LinkError."""
        await self._wire.send(Dropped())

    async def state(self, depth: int, pin: StatePin) -> None:
        """As `pages`, of the state behind `depth` pages."""
        try:
            if self._is_read:
                await self._wire.send(StateAt(depth, pin.host))
                await self._hold()
            else:
                await self._wire.send_pages(State(depth), self._pages.state(pin.host))
        finally:
            pin.release()

    async def _hold(self) -> None:
        await self._wire.receive(TAKEN, TAKE_S)
        await self._wire.send(Held())


class _FirstToken:
    """The first token of the answer, which is sent once it is there."""

    def __init__(self, wire: Wire, room: Room) -> None:
        self._wire = wire
        self._room: Room | None = room  # None: it was sent

    async def send(self) -> None:
        """Sends it, if it is there and was not sent. Raises LinkError."""
        if self._room is not None and self._room.first is not None:
            first, self._room = self._room.first, None
            await self._wire.send(first)


class _Beat:
    """Waits for something new in the rooms, and sends a notice now and then that it still waits."""

    def __init__(self, wire: Wire, rooms: Rooms) -> None:
        self._wire, self._rooms = wire, rooms
        self._notice_s = monotonic()

    async def wait(self) -> None:
        """Returns when it is worth looking again."""
        await self._rooms.changed(BEAT_S)
        if monotonic() - self._notice_s >= BEAT_S:
            await self._wire.send(Waiting())
            self._notice_s = monotonic()


async def _send_sections(out: _Out, saving: Saving, beat: _Beat, first: _FirstToken | None) -> bool:
    """Sends pages layer by layer while a step saves them. -> whether they are on the other side. Raises
    LinkError."""
    sent = [0] * len(out.stages)
    try:
        while (stored := saving.num_stored()) is not None:
            if first is not None:
                await first.send()
            for stage, end in enumerate(stored):
                if end > sent[stage]:
                    section = out.next_section(stage, sent[stage], end, len(saving.pins))
                    await out.section(saving.pins, section)
                    sent[stage] = section.end
                    break  # what else was stored meanwhile, and the first token, are looked at again
            else:
                if sent == [len(parts) for parts in out.stages]:
                    return True
                await beat.wait()
        if any(sent):
            await out.drop()
        return False
    finally:
        saving.release()
