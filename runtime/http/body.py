"""Reads request bodies up to a size, from clients that keep sending: a byte now and then holds no room for
long."""

from collections.abc import AsyncIterator

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import InvalidRequest, TooLarge
from runtime.http.body_budget import LEASE, BodyLease
from runtime.http.cut_body import MIN_BYTES, CutBody
from runtime.http.json_weight import joined_body
from runtime.http.request_cycle import EXTENSION, RequestCycle
from runtime.memory_file import MemoryFile

MAX_DIGITS = 18  # of a content-length: no body has more bytes, and `int` refuses 4,301
MAX_PAUSE_S = 30.0  # between two parts of a body
MIN_BYTES_PER_S = 1024.0  # of a body, on average, after MAX_PAUSE_S
# spent on throwing the rest of a refused body away, so that the client gets to read the answer
MAX_DISCARD_S = 2.0


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole JSON body, which counts in the request's BodyLease. Raises TooLarge (before reading it, if
    content-length is too large; also for too many values), Unavailable when all bodies together are too
    large, HTTPException 408 for a body that stops coming, and ClientDisconnect."""
    return (await read_cut_body(scope, receive, max_bytes)).whole


async def read_cut_body(scope: Scope, receive: Receive, max_bytes: int) -> CutBody:
    """The whole JSON body, and how it is without the files in it. Raises what `read_body` raises, and
    InvalidRequest for a compressed one."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InvalidRequest(f"the body is encoded ({value[:40].decode('latin-1')}); send it as it is")
    _check_declared(scope, max_bytes)
    if (whole := _arrived(scope, max_bytes)) is not None:
        return await joined_body([whole], max_bytes)
    parts: list[bytes] = []
    memory: MemoryFile | None = None  # of a body that may have files in it
    size = 0
    async for part in _counted_parts(scope, receive, max_bytes):
        size += len(part)
        if memory is None and size < MIN_BYTES:
            parts.append(part)
        else:
            memory = memory or MemoryFile()
            for one in (*parts, part):
                memory.append(one)
            parts.clear()
    return await joined_body(parts if memory is None else memory, max_bytes)


async def read_bytes(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """As `read_body`, for a body that is handed on and not decoded here: it may have any number of values."""
    _check_declared(scope, max_bytes)
    if (whole := _arrived(scope, max_bytes)) is not None:
        return whole
    return b"".join([part async for part in _counted_parts(scope, receive, max_bytes)])


def _check_declared(scope: Scope, max_bytes: int) -> None:
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and len(declared) > MAX_DIGITS:
        raise _too_large(max_bytes)
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLarge(f"the body has {int(declared)} bytes; this server takes {max_bytes}")


def _arrived(scope: Scope, max_bytes: int) -> bytes | None:
    """A whole body that has arrived together with the head."""
    cycle: RequestCycle | None = scope.get(EXTENSION)
    whole = None if cycle is None else cycle.take_body()
    if whole is not None:
        _count(scope, len(whole), len(whole), max_bytes)
    return whole


async def _counted_parts(scope: Scope, receive: Receive, max_bytes: int) -> AsyncIterator[bytes]:
    """The parts of a body of up to `max_bytes`, which count in the request's BodyLease."""
    size = 0
    async for part in body_parts(receive, MIN_BYTES_PER_S):
        size += len(part)
        _count(scope, len(part), size, max_bytes)
        yield part


def _count(scope: Scope, num_bytes: int, size: int, max_bytes: int) -> None:
    """Counts bytes in the request's BodyLease, whose body has `size` so far. Raises TooLarge, Unavailable."""
    if size > max_bytes:
        raise _too_large(max_bytes)
    lease: BodyLease | None = scope.get(LEASE)
    if lease is not None:
        lease.add(num_bytes)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is over {max_bytes} bytes, the most that this server takes")


async def body_parts(receive: Receive, min_rate: float = 0.0) -> AsyncIterator[bytes]:
    """The parts of a body as they come. Raises HTTPException 408 for a body that stops coming, or that comes
    with fewer than `min_rate` bytes a second after MAX_PAUSE_S; ClientDisconnect."""
    size, more, begin_s = 0, True, anyio.current_time()
    while more:
        with anyio.move_on_after(MAX_PAUSE_S) as pause:
            message = await receive()
        if pause.cancelled_caught:
            raise HTTPException(408, f"the body stopped after {size} bytes")
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        elapsed_s = anyio.current_time() - begin_s
        if elapsed_s > MAX_PAUSE_S and size < min_rate * elapsed_s:
            raise HTTPException(408, f"the body comes too slowly: {size} bytes in {elapsed_s:.0f} s")
        yield part
        more = message.get("more_body", False)


async def discard_body(receive: Receive) -> None:
    """Reads and drops the rest of a body, for MAX_DISCARD_S at most: a connection that is closed on unread
    data would lose the answer sent before."""
    with anyio.move_on_after(MAX_DISCARD_S):
        message = await receive()
        while message["type"] == "http.request" and message.get("more_body", False):
            message = await receive()


def respond_early(response: Response) -> ASGIApp:
    """An application that sends `response` before the request's body has been read, and ends it when the body
    has come."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_open(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if is_body else message)

        await response(scope, receive, send_open)
        await discard_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return refuse
