"""A connection between two servers: authenticated messages, and between them the bytes of pages.

Messages travel in records (nodes/records.py) behind a handshake (nodes/handshake.py). Pages follow their
message as they are, from the sender's host memory into the receiver's without a copy in between: worker
threads send and receive them, while messages are awaited on the event loop. One side speaks at a time.
"""

import asyncio
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import anyio
import msgspec
from anyio import CapacityLimiter, to_thread
from msgspec.msgpack import Decoder

from runtime.errors import LinkError
from runtime.messages.transfer import Checksums
from runtime.nodes.handshake import (
    MAGIC,
    NONCE_BYTES,
    OTHER_SECRET,
    PROOF_BYTES,
    ClientHandshake,
    ServerHandshake,
)
from runtime.nodes.records import MAX_RECORD_BYTES, TAG_BYTES, Opener, Sealer
from runtime.transfer.checksum import checksum

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
STALL_S = 10.0  # without a byte, after which the other side counts as gone
MOVES = 16  # at once, of a server: threads that a stalled peer may hold for STALL_S
MAX_BUFFERS = 512  # of one system call; Linux takes 1024
CHECKSUMS = Decoder(Checksums)
MAX_FILES = 253  # of one message; a limit of Linux (SCM_MAX_FD)
FILES_MARK = b"m"  # the byte that descriptors travel with
RECORD_HEAD = 5  # uint32 size, kind
T = TypeVar("T")


class Wire:
    """A connection whose other side has proved that it has the key."""

    def __init__(
        self, connection: socket.socket, sealer: Sealer, opener: Opener, threads: CapacityLimiter
    ) -> None:
        """`threads`: how many may move pages at once, of all connections of one kind."""
        self._threads = threads
        self._socket = connection
        self._sealer, self._opener = sealer, opener

    async def send(self, message: msgspec.Struct) -> None:
        """Raises LinkError."""
        await _send(self._socket, self._sealer.seal(msgspec.msgpack.encode(message)))

    async def receive(self, decoder: Decoder[T], within_s: float | None = STALL_S) -> T:
        """The next message, which `decoder` reads. Raises LinkError for any other, when the connection has
        ended, and when nothing has come within the time."""
        while not (messages := self._opener.open(await self._record(within_s))):
            pass
        try:
            return decoder.decode(messages[0])
        except msgspec.MsgspecError as error:
            raise LinkError(f"it sent what is no message of this version: {error}") from None

    async def send_pages(self, head: msgspec.Struct, records: Sequence["Bytes"]) -> None:
        """Sends a message, the records behind it, and their checksums. Raises LinkError."""
        await to_thread.run_sync(self._send_pages, head, records, limiter=self._threads)

    async def receive_pages(self, records: Sequence["Bytes"]) -> None:
        """Fills records with what follows the last message. Raises LinkError, also for what came damaged."""
        found = await to_thread.run_sync(self._receive_pages, records, limiter=self._threads)
        if (await self.receive(CHECKSUMS)).values != tuple(found):
            raise LinkError("pages came damaged")

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    @property
    def is_local(self) -> bool:
        """Whether the other side is on this machine, so that descriptors can be sent."""
        return self._socket.family == socket.AF_UNIX

    async def send_files(self, fds: Sequence[int]) -> None:
        """Sends descriptors of up to MAX_FILES files, to be read only. Raises LinkError, OSError."""
        opened: list[int] = []
        try:
            for fd in fds:
                opened.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
            # one byte with descriptors fits in the buffer of a socket whose other side has just asked
            socket.send_fds(self._socket, [FILES_MARK], opened)
        except BlockingIOError:
            raise LinkError("it took nothing") from None
        finally:
            for fd in opened:
                os.close(fd)

    async def receive_files(self, count: int) -> list[int]:
        """The descriptors of `send_files`, which the caller closes. Raises LinkError."""
        loop, arrived = asyncio.get_running_loop(), anyio.Event()
        loop.add_reader(self._socket, arrived.set)
        try:
            with anyio.fail_after(STALL_S):
                await arrived.wait()
            mark, fds, _, _ = socket.recv_fds(self._socket, len(FILES_MARK), count)
        except (TimeoutError, OSError) as error:
            raise LinkError(f"no descriptors of its memory came ({error})") from None
        finally:
            loop.remove_reader(self._socket)
        if mark != FILES_MARK or len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise LinkError(f"{len(fds)} descriptors came where {count} were due")
        return fds

    async def _record(self, within_s: float | None) -> bytearray:
        """One record, and nothing of what follows it."""
        with anyio.move_on_after(within_s) as limit:
            head = await _receive(self._socket, RECORD_HEAD)
        if limit.cancelled_caught:
            raise LinkError(f"nothing came from it for {within_s:g} s")
        size = int.from_bytes(head[:4], "big")
        if size > MAX_RECORD_BYTES:
            raise LinkError(f"a record of {size} bytes is none of this protocol")
        with anyio.move_on_after(STALL_S) as limit:
            return head + await _receive(self._socket, size + TAG_BYTES)
        raise LinkError("a record stopped in the middle")

    def _send_pages(self, head: msgspec.Struct, records: Sequence["Bytes"]) -> None:
        self._write([memoryview(self._sealer.seal(msgspec.msgpack.encode(head)))])
        values: list[int] = []
        for record in records:  # a checksum of what was just sent finds it in the cache of the processor
            self._write(record.views)
            values.append(checksum(record.parts))
        self._write([memoryview(self._sealer.seal(msgspec.msgpack.encode(Checksums(tuple(values)))))])

    def _receive_pages(self, records: Sequence["Bytes"]) -> list[int]:
        values: list[int] = []
        for record in records:
            _move(self._socket, record.views, self._read, select.POLLIN)
            values.append(checksum(record.parts))
        return values

    def _write(self, views: Sequence[memoryview]) -> None:
        _move(self._socket, views, self._socket.sendmsg, select.POLLOUT)

    def _read(self, views: Sequence[memoryview]) -> int:
        return self._socket.recvmsg_into(views)[0]


class Bytes(NamedTuple):
    """A page or a state in memory: in as few pieces as possible, and in the pieces of its checksum, which are
    those of every layout of memory."""

    views: list[memoryview]
    parts: list[memoryview]


async def connect(host: str, port: int, key: bytes, threads: CapacityLimiter) -> Wire:
    """A connection to the server at this address, whose pages `threads` move. Raises LinkError."""
    failure: OSError | UnicodeError | None = None
    with anyio.move_on_after(CONNECT_S):
        try:
            for family, kind, protocol, _, address in await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            ):
                try:
                    return await _connect(socket.socket(family, kind, protocol), address, key, threads)
                except OSError as error:  # a name may have addresses at which nothing listens
                    failure = error
        except (OSError, UnicodeError) as error:  # of the name
            failure = error
        raise LinkError(f"no connection to {host}:{port} ({failure})")
    raise LinkError(f"{host}:{port} did not answer within {CONNECT_S:g} s")


async def connect_local(name: bytes, key: bytes, threads: CapacityLimiter) -> Wire | None:
    """A connection to the server that listens under this abstract name on this machine; None: there is none.
    Raises LinkError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with anyio.move_on_after(CONNECT_S):
        try:
            return await _connect(connection, name, key, threads)
        except OSError:
            return None
    raise LinkError(f"a server on this machine did not answer within {CONNECT_S:g} s")


async def _connect(connection: socket.socket, address: object, key: bytes, threads: CapacityLimiter) -> Wire:
    try:
        connection.setblocking(False)
        _send_at_once(connection)
        await asyncio.get_running_loop().sock_connect(connection, address)  # type: ignore[arg-type]
        return await _shake_as_client(connection, key, threads)
    except BaseException:
        connection.close()
        raise


async def accept(connection: socket.socket, key: bytes, threads: CapacityLimiter) -> Wire:
    """The other end of `connect`. Raises LinkError; the caller closes the connection then."""
    handshake = ServerHandshake(key)
    with anyio.move_on_after(HANDSHAKE_S):
        _send_at_once(connection)
        await _send(connection, handshake.open())
        reply = handshake.receive(await _receive(connection, len(MAGIC) + NONCE_BYTES + PROOF_BYTES))
        await _send(connection, reply)
        if handshake.keys is None:
            raise LinkError(OTHER_SECRET)
        return Wire(connection, Sealer(handshake.keys.send), Opener(handshake.keys.receive), threads)
    raise LinkError(f"it did not prove its key within {HANDSHAKE_S:g} s")


def _send_at_once(connection: socket.socket) -> None:
    """Messages are not held back for more."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _shake_as_client(connection: socket.socket, key: bytes, threads: CapacityLimiter) -> Wire:
    handshake = ClientHandshake(key)
    await _send(connection, handshake.receive(await _receive(connection, len(MAGIC) + NONCE_BYTES)))
    handshake.receive(await _receive(connection, PROOF_BYTES))
    assert handshake.keys is not None, "else it raises"
    return Wire(connection, Sealer(handshake.keys.send), Opener(handshake.keys.receive), threads)


async def _send(connection: socket.socket, data: bytes) -> None:
    try:
        with anyio.move_on_after(STALL_S):
            return await asyncio.get_running_loop().sock_sendall(connection, data)
    except OSError as error:
        raise LinkError(f"the connection broke ({error.strerror or error})") from None
    raise LinkError(f"it took nothing for {STALL_S:g} s")


async def _receive(connection: socket.socket, size: int) -> bytearray:
    data, at = bytearray(size), 0
    try:
        while at < size:
            count = await asyncio.get_running_loop().sock_recv_into(connection, memoryview(data)[at:])
            if not count:
                raise LinkError("the connection was closed")
            at += count
    except OSError as error:
        raise LinkError(f"the connection broke ({error.strerror or error})") from None
    return data


def _move(
    connection: socket.socket,
    views: Sequence[memoryview],
    move: Callable[[Sequence[memoryview]], int],
    ready: int,
) -> None:
    """In a worker thread: sends or receives all bytes of `views`; `ready`: the event to wait for."""
    waiting = select.poll()
    waiting.register(connection, ready)
    rest, at = list(views), 0
    while at < len(rest):
        try:
            count = move(rest[at : at + MAX_BUFFERS])
        except (BlockingIOError, InterruptedError):
            if not waiting.poll(STALL_S * 1000):
                raise LinkError(f"no byte moved for {STALL_S:g} s") from None
            continue
        except OSError as error:
            raise LinkError(f"the connection broke ({error.strerror or error})") from None
        if not count:
            raise LinkError("the connection was closed")
        while at < len(rest) and count >= len(rest[at]):
            count -= len(rest[at])
            at += 1
        if count:
            rest[at] = rest[at][count:]
