"""The side of a server that computes prompts: answers those that ask for pages (messages/transfer.py).

Each connection is a task. It answers one question after the other, and pages leave in the order of the
prompt, in portions, as soon as they are in host memory: while later parts of a long prompt are computed, the
earlier ones are on their way.
"""

import asyncio
import socket
from time import monotonic

import anyio
from anyio import CapacityLimiter
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct
from msgspec.msgpack import Decoder

from runtime import log
from runtime.cache.storage_connector import KEY_BYTES, Pin, StatePin
from runtime.errors import LinkError, StartError
from runtime.messages.transfer import Ask, End, Found, Pages, Refused, State, Waiting
from runtime.transfer.rooms import Reader, Room, Rooms
from runtime.transfer.wire import MOVES, Wire, accept

LOG = log.get("transfer")
IDLE_S = 600.0  # without a question, after which a connection ends; a decode server makes another one
BEAT_S = 2.0  # between two notices that pages are still to come
ROOM_S = 10.0  # within which the request of a room must come, once it was asked for
PORTION_BYTES = 16 << 20  # of pages behind one message
MAX_CONNECTIONS = 1024
QUESTIONS = Decoder(Ask)
OTHER_MODEL = "it has another model, other weights, or other options that decide about keys and values"


class Sent(Struct):
    """Counts since the start."""

    pages: int = 0
    bytes: int = 0
    refused: int = 0
    connections: int = 0  # that are open now


class PageService:
    """Listens, and sends pages of `rooms`."""

    def __init__(self, rooms: Rooms, key: bytes) -> None:
        self.rooms = rooms
        self.identity = b""  # set before the first room opens
        self.sent = Sent()
        self._key = key
        self._threads = CapacityLimiter(MOVES)

    async def run(self, host: str, port: int, *, task_status: TaskStatus[int]) -> None:
        """Serves until cancelled; reports the port. Raises StartError."""
        listener = listen(host, port)
        task_status.started(listener.getsockname()[1])
        loop = asyncio.get_running_loop()
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    try:
                        connection, address = await loop.sock_accept(listener)
                    except OSError as error:  # too many open files: others have to end first
                        LOG.warning("a connection could not be accepted", error=str(error))
                        await anyio.sleep(0.1)
                        continue
                    self._begin(tasks, connection, str(address[0]))
        finally:
            listener.close()

    def _begin(self, tasks: TaskGroup, connection: socket.socket, peer: str) -> None:
        if self.sent.connections >= MAX_CONNECTIONS:
            connection.close()
            return
        self.sent.connections += 1
        tasks.start_soon(self._serve, connection, peer)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
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
        await wire.send(Found(room.pages.layout))
        beat, reader = _Beat(wire, self.rooms), Reader(room, ask.first, ask.keys)
        end = await self._send_pages(wire, room, ask, reader, beat)
        while reader.is_state_coming(end):
            await beat.wait()
        if (found := reader.state(end)) is not None:
            await self._send_state(wire, room, *found)
        await wire.send(End())

    async def _send_pages(self, wire: Wire, room: Room, ask: Ask, reader: Reader, beat: "_Beat") -> int:
        """Sends pages as they become ready. -> how many of those that were asked for are on the other side"""
        portion = max(1, PORTION_BYTES // room.pages.layout.page_bytes)
        position = ask.num_there
        while position < len(ask.keys) // KEY_BYTES:
            if pins := reader.ready(position, portion):
                await self._send(wire, room, pins)
                position += len(pins)
            elif reader.is_coming(position):
                await beat.wait()
            else:
                break
        return position

    async def _send_state(self, wire: Wire, room: Room, depth: int, pin: StatePin) -> None:
        try:
            await wire.send_pages(State(depth), [room.pages.state(pin.host)])
        finally:
            pin.release()

    async def _find(self, wire: Wire, number: int) -> Room | None:
        """The room, for which the other half of the request may still be on its way."""
        deadline = monotonic() + ROOM_S
        while (room := self.rooms.find(number)) is None and (left_s := deadline - monotonic()) > 0:
            if self.rooms.is_refused(number):
                return None
            if not await self.rooms.changed(min(left_s, BEAT_S)):
                await wire.send(Waiting())
        return room

    async def _send(self, wire: Wire, room: Room, pins: list[Pin]) -> None:
        try:
            await wire.send_pages(Pages(len(pins)), [room.pages.page(pin.host) for pin in pins])
        finally:
            for pin in pins:
                pin.release()
        self.sent.pages += len(pins)
        self.sent.bytes += len(pins) * room.pages.layout.page_bytes


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


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MAX_CONNECTIONS)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartError(
            f"--disaggregation-bootstrap-port {port} can't be listened on at {host} "
            f"({error.strerror or error}); give another one, or 0 for a free one"
        ) from None
    listener.setblocking(False)
    return listener
