"""One HTTP/1.1 request and its answer, as ASGI sees them: the scope's `receive` and `send`."""

from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from time import time

from msgspec.json import encode
from starlette.types import Message, Scope

from runtime.actors.channels import Signal
from runtime.http.streaming.connection import Connection

# ASGI extension and scope key of a RequestCycle whose connection may be written to directly
EXTENSION = "runtime.request_cycle"
MAX_UNREAD_BYTES = 64 * 1024  # of a body that the application has not asked for; above, no more is read
CHUNKED = b"transfer-encoding: chunked\r\n"
CLOSING = b"connection: close\r\n"
LAST_CHUNK = b"0\r\n\r\n"
BODILESS = frozenset({204, 304})  # statuses of answers without a body


class RequestCycle:
    """One request and its answer. `on_disconnect` is called when the client leaves before the answer is
    complete."""

    __slots__ = (
        "connection",
        "scope",
        "keeps_alive",
        "has_whole_body",
        "is_started",
        "is_ended",
        "has_client_left",
        "on_disconnect",
        "own_receive",
        "own_send",
        "_on_end",
        "_pieces",
        "_num_unread",
        "_has_read_all",
        "_news",
        "_is_chunked",
        "_takes_body",
        "_num_left",
    )

    def __init__(
        self,
        connection: Connection,
        scope: Scope,
        on_end: Callable[["RequestCycle"], None],
        *,
        keeps_alive: bool,
    ) -> None:
        """`on_end` is called once: when the answer is complete, or when there will be none. `keeps_alive`:
        the client takes further answers on this connection."""
        self.connection = connection
        self.scope = scope
        self.keeps_alive = keeps_alive
        self.has_whole_body = False  # the request's has arrived
        self.is_started = False  # the head of the answer is written
        self.is_ended = False
        self.has_client_left = False
        self.on_disconnect: Callable[[], None] | None = None
        self.own_receive = self.receive  # bound once, so that a wrapper can be recognised by identity
        self.own_send = self.send
        self._on_end = on_end
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._has_read_all = False
        self._news = Signal()  # for `receive`
        self._is_chunked = False
        self._takes_body = True
        self._num_left: int | None = None  # bytes of the answer's body that its content-length still promises

    def feed(self, piece: bytes) -> None:
        """Takes a part of the request's body."""
        self._pieces.append(piece)
        self._num_unread += len(piece)
        if self._num_unread > MAX_UNREAD_BYTES:
            self.connection.pause_reading()
        self._news.set()

    def feed_end(self) -> None:
        """The request's body is complete."""
        self.has_whole_body = True
        self._news.set()

    def take_body(self) -> bytes | None:
        """The whole body of the request; None while it is not complete, or was read in part."""
        if not self.has_whole_body or self._has_read_all:
            return None
        self._has_read_all = True
        return self._take_pieces()

    def disconnect(self) -> None:
        """The client has left."""
        self.has_client_left = True
        self._news.set()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def give_up(self) -> None:
        """Ends an answer that the application did not complete: 500 if it has not begun, else by closing."""
        if self.is_ended:
            return
        self.keeps_alive = False
        if not self.is_started:
            self.refuse(500)
        else:
            self._end()

    def refuse(self, status: int) -> None:
        """Answers a request whose body is not framed as HTTP has it (400), or for which the application had
        no answer (500), and ends."""
        self.keeps_alive = False
        body = _CUT_OFF.get(status, b"")
        kind = [(b"content-type", b"application/json")] if body else []
        self._start(status, [(b"content-length", b"%d" % len(body)), *kind])
        self._write(body, is_last=True)

    async def receive(self) -> Message:
        """The next part of the body, or `http.disconnect` after the end of either side."""
        while True:
            if (self._pieces or self.has_whole_body) and not self._has_read_all:
                self._has_read_all = self.has_whole_body
                return {
                    "type": "http.request",
                    "body": self._take_pieces(),
                    "more_body": not self.has_whole_body,
                }
            if self.is_ended or self.has_client_left:
                return {"type": "http.disconnect"}
            await self._news.wait()

    async def send(self, message: Message) -> None:
        """Writes the head or a part of the body; waits while the connection is full."""
        if self.is_ended:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.is_started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.is_started:
            self._write(message.get("body", b""), is_last=not message.get("more_body", False))
            if self.connection.is_full:
                await self.connection.drained()
        else:
            raise RuntimeError(f"the application sent {kind} out of order")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        is_framed = is_closing = False
        lines = [b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                is_framed, self._num_left = True, int(value)
            elif name == b"connection":
                is_closing = b"close" in value.lower()
        self._takes_body = status not in BODILESS and self.scope["method"] != "HEAD"
        if not self._takes_body:
            self._num_left = None
        elif not is_framed:
            self._is_chunked = self.scope["http_version"] == "1.1"
            if self._is_chunked:
                lines.append(CHUNKED)
            else:
                self.keeps_alive = False
        if is_closing:
            self.keeps_alive = False
        elif not self.keeps_alive:
            lines.append(CLOSING)
        lines.append(date_line(int(time())))
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header of the answer has a line break")
        self.is_started = True
        self.connection.write(head + b"\r\n")

    def _write(self, data: bytes, *, is_last: bool) -> None:
        if data and self._takes_body:
            if self._num_left is not None:
                self._num_left -= len(data)
            self.connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        if is_last:
            if self._is_chunked:
                self.connection.write(LAST_CHUNK)
            if self._num_left:  # fewer or more bytes than promised: what follows would be misread
                self.keeps_alive = False
            self._end()

    def _end(self) -> None:
        self.is_ended = True
        self._news.set()
        self._on_end(self)

    def _take_pieces(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        if self._num_unread > MAX_UNREAD_BYTES:
            self.connection.resume_reading()
        self._num_unread = 0
        return body


@lru_cache(maxsize=1)
def date_line(now_s: int) -> bytes:
    """The `date` header of answers, as a line."""
    return b"date: %b\r\n" % formatdate(now_s, usegmt=True).encode()


def refusal_bytes(status: int) -> bytes:
    """An answer to what is no request, or to a connection that there is no room for, which ends with it."""
    body = _REFUSALS.get(status, b"")
    kind = b"content-type: application/json\r\n" if body else b""
    return b"HTTP/1.1 %d \r\ncontent-length: %d\r\n%b%b%b\r\n%b" % (
        status,
        len(body),
        kind,
        CLOSING,
        date_line(int(time())),
        body,
    )


def _refusal(message: str, kind: str, code: str) -> bytes:
    return encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


_CUT_OFF = {
    400: _refusal(
        "the body is not framed as HTTP has it; send it with content-length, or in chunks",
        "invalid_request_error",
        "bad_request",
    )
}
_REFUSALS = {
    400: _refusal(
        "this is no whole HTTP request with a host header; a client of https:// needs a server that was "
        "started with --ssl-certfile",
        "invalid_request_error",
        "bad_request",
    ),
    503: _refusal("the server has no room for another connection; try again", "server_error", "unavailable"),
    505: _refusal(
        "this version of HTTP is not served; send 1.0, 1.1 or 2", "invalid_request_error", "bad_request"
    ),
}
