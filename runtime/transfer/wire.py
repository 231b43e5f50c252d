"""A connection between two servers: authenticated messages, and between them the bytes of pages.

Messages travel in records (nodes/records.py) behind a handshake (nodes/handshake.py). Pages follow their
message as they are, from the sender's host memory into the receiver's without a copy in between: worker
threads send and receive them, while messages are awaited on the event loop. One side speaks at a time.

A thread gives the kernel many pages in one call, which waits for all of them, and adds up their checksum
while they are in the processor's cache. So it runs next to no Python, which would hold up the event loop.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import anyio
import msgspec
from anyio import CapacityLimiter, to_thread
from msgspec.msgpack import Decoder

from runtime.errors import LinkError
from runtime.messages.transfer import Sum
from runtime.nodes.handshake import (
    MAGIC,
    NONCE_BYTES,
    OTHER_SECRET,
    PROOF_BYTES,
    ClientHandshake,
    ServerHandshake,
)
from runtime.nodes.records import MAX_RECORD_BYTES, TAG_BYTES, Opener, Sealer
from runtime.transfer.checksum import Checksum

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
STALL_S = 10.0  # without a byte, after which the other side counts as gone
MOVES = 16  # at once, of a server: threads that a stalled peer may hold for STALL_S
MAX_BUFFERS = 512  # of one system call; Linux takes 1024
CALL_BYTES = 512 << 10  # of one system call: what is in the processor's cache behind it
SUM = Decoder(Sum)
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

    async def send_pages(self, head: msgspec.Struct, views: Sequence[memoryview]) -> None:
        """Sends a message, bytes behind it, and their checksum. Raises LinkError."""
        await to_thread.run_sync(self._send_pages, head, views, limiter=self._threads)

    async def receive_pages(self, views: Sequence[memoryview]) -> None:
        """Fills memory with what follows the last message. Raises LinkError, also for what came damaged."""
        found = await to_thread.run_sync(self._receive_pages, views, limiter=self._threads)
        if (await self.receive(SUM)).value != found:
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

    def _send_pages(self, head: msgspec.Struct, views: Sequence[memoryview]) -> None:
        with _Waiting(self._socket):
            self._write([memoryview(self._sealer.seal(msgspec.msgpack.encode(head)))])
            found = self._move(views, self._write)
            self._write([memoryview(self._sealer.seal(msgspec.msgpack.encode(Sum(found))))])

    def _receive_pages(self, views: Sequence[memoryview]) -> int:
        with _Waiting(self._socket):
            return self._move(views, self._read)

    def _move(self, views: Sequence[memoryview], move: Callable[[list[memoryview]], None]) -> int:
        """Sends or receives all bytes. -> their checksum"""
        checksum = Checksum()
        for call in calls(views):
            move(call)
            for view in call:  # while it is in the processor's cache
                checksum.add(view)
        return checksum.value

    def _write(self, views: list[memoryview]) -> None:
        _move_all(views, self._socket.sendmsg)

    def _read(self, views: list[memoryview]) -> None:
        _move_all(views, self._receive_into)

    def _receive_into(self, views: list[memoryview]) -> int:
        return self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]


class _Waiting:
    """Lets the calls of a worker thread wait in the kernel, STALL_S at most, where the event loop's must not.
    The loop leaves the socket alone meanwhile."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def __enter__(self) -> None:
        limit = struct.pack("@ll", int(STALL_S), int(STALL_S % 1 * 1e6))  # timeval
        try:
            os.set_blocking(self._socket.fileno(), True)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
        except OSError as error:
            raise LinkError(f"the connection broke ({error.strerror or error})") from None

    def __exit__(self, *_: object) -> None:
        if self._socket.fileno() >= 0:
            os.set_blocking(self._socket.fileno(), False)


def calls(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Memory in the order of `views`, in portions of one system call each."""
    call, size = list[memoryview](), 0
    for view in views:
        at = 0
        while at < len(view):
            piece = view[at : at + CALL_BYTES - size]
            call.append(piece)
            at, size = at + len(piece), size + len(piece)
            if size == CALL_BYTES or len(call) == MAX_BUFFERS:
                yield call
                call, size = [], 0
    if call:
        yield call


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


def _move_all(views: list[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    """In a worker thread: sends or receives all bytes of `views` by calls that wait."""
    left = views
    while left:
        try:
            count = move(left)
        except (BlockingIOError, InterruptedError):
            raise LinkError(f"no byte moved for {STALL_S:g} s") from None
        except OSError as error:
            raise LinkError(f"the connection broke ({error.strerror or error})") from None
        if not count:
            raise LinkError("the connection was closed")
        at = 0
        while at < len(left) and count >= len(left[at]):
            count -= len(left[at])
            at += 1
        left = left[at:]
        if count:
            left = [left[0][count:], *left[1:]]
