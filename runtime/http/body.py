"""Reads request bodies: within a size, and from clients that keep sending."""

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import TooLarge
from runtime.http.request_cycle import EXTENSION, RequestCycle

MAX_PAUSE_S = 30.0  # between two pieces of a body
# spent on throwing the rest of a refused body away, so that the client gets to read the answer
MAX_DISCARD_S = 2.0


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Raises TooLarge (before reading, when content-length says so), HTTPException 408, or
    ClientDisconnect."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLarge(f"the body has {int(declared)} bytes; this server takes {max_bytes}")
    cycle: RequestCycle | None = scope.get(EXTENSION)
    whole = None if cycle is None else cycle.take_body()  # has arrived together with the head
    if whole is not None:
        if len(whole) > max_bytes:
            raise TooLarge(f"the body is over {max_bytes} bytes, the most that this server takes")
        return whole
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        with anyio.move_on_after(MAX_PAUSE_S) as pause:
            message = await receive()
        if pause.cancelled_caught:
            raise HTTPException(408, f"the body stopped after {size} bytes")
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise TooLarge(f"the body is over {max_bytes} bytes, the most that this server takes")
        pieces.append(piece)
        more = message.get("more_body", False)
    return b"".join(pieces)


async def discard_body(receive: Receive) -> None:
    """Reads on, for a moment and keeping nothing: a connection closed on unread data would lose the answer
    sent before."""
    with anyio.move_on_after(MAX_DISCARD_S):
        message = await receive()
        while message["type"] == "http.request" and message.get("more_body", False):
            message = await receive()


def refusing(response: Response) -> ASGIApp:
    """Sends the refusal of a body at once, and ends the response when the rest of the body is through."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_open(message: Message) -> None:
            await send(message | {"more_body": True} if message["type"] == "http.response.body" else message)

        await response(scope, receive, send_open)
        await discard_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return refuse
