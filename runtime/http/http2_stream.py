"""One HTTP/2 request and its answer, as ASGI sees them: the scope's `receive` and `send`.

Both directions have bounds: of a body no more is acknowledged than the application has read, and `send` waits
while more than UNSENT_BYTES wait for the client's window.
"""

from math import inf
from time import time
from typing import Protocol

from starlette.types import Message, Scope

from runtime.actors.channels import Signal
from runtime.http.request_cycle import BODILESS, date_line

UNSENT_BYTES = 16 * 1024  # of an answer that wait for the client's window; above, `send` waits
NOT_IN_HTTP2 = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection"}
)

Headers = list[tuple[bytes, bytes]]


class StreamOwner(Protocol):
    """The connection, as its streams use it."""

    def start(self, stream: "Http2Stream", headers: Headers) -> None:
        """Sends the head of the answer."""
        ...

    def send_waiting(self, stream: "Http2Stream") -> None:
        """Sends what the client has room for of `stream.unsent`, and the end of a complete answer."""
        ...

    def acknowledge(self, stream: "Http2Stream", num_bytes: int) -> None:
        """Lets the client send so many bytes more."""
        ...

    def give_up(self, stream: "Http2Stream") -> None:
        """The application has ended, with or without an answer."""
        ...


class Http2Stream:
    """One request and its answer. Its connection feeds it, and sends what is in `unsent`."""

    __slots__ = (
        "id",
        "scope",
        "owner",
        "unsent",
        "is_complete",
        "is_over",
        "is_started",
        "has_whole_body",
        "progress_s",
        "own_receive",
        "own_send",
        "_pieces",
        "_num_unacknowledged",
        "_has_read_all",
        "_news",
        "_room",
        "_takes_body",
    )

    def __init__(self, id: int, scope: Scope, owner: StreamOwner) -> None:
        self.id = id
        self.scope = scope
        self.owner = owner
        self.unsent = bytearray()  # of the answer
        self.is_complete = False  # nothing comes after `unsent`
        self.is_over = False  # nothing is sent any more: all is, or the client has left
        self.is_started = False  # the head of the answer is sent
        self.has_whole_body = False  # the request's has arrived
        self.progress_s = (
            inf  # when something of `unsent` was last sent, or began to wait; inf: nothing waits
        )
        self.own_receive = self.receive
        self.own_send = self.send
        self._pieces: list[bytes] = []
        self._num_unacknowledged = 0  # bytes of the client's window that `_pieces` and their padding hold
        self._has_read_all = False
        self._news = Signal()  # for `receive`
        self._room = Signal()  # for `send`
        self._takes_body = True

    def feed(self, piece: bytes, num_bytes: int) -> None:
        """Takes a part of the request's body, which has taken `num_bytes` of the client's window."""
        self._pieces.append(piece)
        self._num_unacknowledged += num_bytes
        self._news.set()

    def feed_end(self) -> None:
        """The request's body is complete."""
        self.has_whole_body = True
        self._news.set()

    def sent(self) -> None:
        """Something of `unsent` was sent, or it never will be."""
        if self.is_over or len(self.unsent) <= UNSENT_BYTES:
            self._room.set()

    def end(self) -> int:
        """The answer is sent, or the client has left. -> bytes of the client's window that were never read"""
        self.is_over = True
        self.unsent.clear()
        self._pieces.clear()
        num_bytes, self._num_unacknowledged = self._num_unacknowledged, 0
        self._news.set()
        self._room.set()
        return num_bytes

    def give_up(self) -> None:
        """Ends an answer that the application did not complete."""
        self.owner.give_up(self)

    async def receive(self) -> Message:
        """The next part of the body, or `http.disconnect` after the end of either side."""
        while True:
            if self.is_over:
                return {"type": "http.disconnect"}
            if (self._pieces or self.has_whole_body) and not self._has_read_all:
                self._has_read_all = self.has_whole_body
                body = b"".join(self._pieces)
                self._pieces.clear()
                num_bytes, self._num_unacknowledged = self._num_unacknowledged, 0
                if num_bytes:
                    self.owner.acknowledge(self, num_bytes)
                return {"type": "http.request", "body": body, "more_body": not self.has_whole_body}
            await self._news.wait()

    async def send(self, message: Message) -> None:
        """Sends the head or a part of the body; waits while the client takes nothing."""
        if self.is_over or self.is_complete:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.is_started:
            self._start(message)
        elif kind == "http.response.body" and self.is_started:
            if self._takes_body:
                self.unsent += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
            self.owner.send_waiting(self)
            while len(self.unsent) > UNSENT_BYTES and not self.is_over:
                await self._room.wait()
        else:
            raise RuntimeError(f"the application sent {kind} out of order")

    def _start(self, message: Message) -> None:
        status = message["status"]
        headers = [(b":status", b"%d" % status)]
        headers += [header for header in message.get("headers", ()) if header[0] not in NOT_IN_HTTP2]
        headers.append((b"date", date_line(int(time()))[len("date: ") : -len("\r\n")]))
        self._takes_body = status not in BODILESS and self.scope["method"] != "HEAD"
        self.is_started = True
        self.owner.start(self, headers)
