"""HTTP/1.1 to a server behind the router: one request at a time on a connection that is kept open.

Bodies are handed on as they come. While no one reads, a connection holds HIGH_BYTES at most and then takes
nothing from its socket, so a slow client slows the server's stream down (backpressure).
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

from httptools import HttpParserError, HttpResponseParser

from runtime.errors import RuntimeFault

MAX_HEAD_BYTES = 64 * 1024
HIGH_BYTES = 64 * 1024
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(RuntimeFault):
    """A server could not be reached, broke its answer off, or sent what is no HTTP."""


class Address(Protocol):
    """Where a server listens."""

    host: str
    port: int
    has_tls: bool
    authority: str


class UpstreamConnection(asyncio.Protocol):
    """A connection to a server. `is_reused`: it carried an answer before, so the server may have closed it
    for being idle."""

    def __init__(self) -> None:
        self.is_reused = False
        self._transport: asyncio.Transport | None = None
        self._answer: UpstreamAnswer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """The server has sent something; what comes without a request closes the connection."""
        if self._answer is None:
            self.close()
        else:
            self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        self._transport = None
        if self._answer is not None:
            self._answer.end(error)

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed it, as far as is known here."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Closes it at once: a server sees that its client has left."""
        if self._transport is not None:
            self._transport.abort()

    def take_in(self, *, more: bool) -> None:
        """Goes on, or stops, taking what the server sends."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.resume_reading if more else self._transport.pause_reading)()

    def release(self) -> None:
        """The answer is whole: another request may follow."""
        self._answer = None
        self.is_reused = True

    async def request(
        self, method: str, target: bytes, headers: Headers, body: bytes, timeout_s: float
    ) -> "UpstreamAnswer":
        """Sends a request; returns when the head of its answer is here. Raises UpstreamError."""
        if self._transport is None:
            raise UpstreamError("the server closed the connection")
        lines = [method.encode() + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"content-length: %d" % len(body), b"", body]
        answer = self._answer = UpstreamAnswer(self, timeout_s, has_body=method != "HEAD")
        self._transport.write(b"\r\n".join(lines))
        await answer.read_head()
        return answer


class UpstreamAnswer:
    """An answer: its head, then its body as it comes. Callbacks are httptools'."""

    def __init__(self, connection: UpstreamConnection, timeout_s: float, *, has_body: bool) -> None:
        """`timeout_s`: the longest time without a byte. `has_body` False: an answer to HEAD, whose length is
        of a body that does not come."""
        self.connection = connection
        self.headers: list[tuple[bytes, bytes]] = []
        self._loop = asyncio.get_running_loop()
        self._timeout_s, self._has_body = timeout_s, has_body
        self._parser = HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._num_bytes = 0  # of the head until that is here, then of `_pieces`
        self._has_head = False
        self._is_complete = False
        self._is_paused = False
        self._keeps_alive = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._received_s = self._loop.time()
        self._timer = self._loop.call_later(timeout_s, self._check_silence)

    @property
    def status(self) -> int:
        """The status code."""
        return int(self._parser.get_status_code())

    @property
    def can_be_kept(self) -> bool:
        """Whether the connection can carry another request."""
        return self._is_complete and self._keeps_alive and self.connection.is_open

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is here; of 1xx another one follows."""
        self._has_head = self.status >= 200
        if not self._has_head:
            self.headers.clear()
        self._num_bytes = 0
        self._keeps_alive = self._has_body and self._parser.should_keep_alive()
        self._is_complete = self._has_head and not self._has_body

    def on_body(self, piece: bytes) -> None:
        """Takes a part of the body."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._is_complete = self._has_head

    def feed(self, data: bytes) -> None:
        """Takes what the server has sent."""
        self._received_s = self._loop.time()
        if not self._has_head:
            self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"the answer is no HTTP ({error})")
            return
        if not self._has_head and self._num_bytes > MAX_HEAD_BYTES:
            self._fail("the head of the answer is too long")
            return
        if self._num_bytes > HIGH_BYTES and not self._is_paused:
            self._is_paused = True
            self.connection.take_in(more=False)
        self._wake()

    def end(self, error: Exception | None) -> None:
        """The connection has ended: so has an answer without a length."""
        is_framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if self._has_head and not is_framed and error is None:
            self._is_complete = True
        if not self._is_complete:
            self._fail(f"the connection ended before the answer did{f' ({error})' if error else ''}")
        self._wake()

    async def read_head(self) -> None:
        """Waits until the head is here. Raises UpstreamError."""
        while not self._has_head:
            await self._more()

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; empty at its end. Raises UpstreamError when it breaks
        off."""
        while not self._pieces:
            if self._is_complete:
                self._timer.cancel()
                return b""
            await self._more()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._num_bytes = [], 0
        if self._is_paused:
            self._is_paused = False
            self._received_s = self._loop.time()
            self.connection.take_in(more=True)
        return piece

    def close(self) -> None:
        """No one reads on: the connection ends, unless it can be kept."""
        self._timer.cancel()
        if not self.can_be_kept:
            self.connection.close()

    async def _more(self) -> None:
        """Returns when something has come."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._pieces:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        self._timer.cancel()
        if self._error is None:
            self._error = UpstreamError(reason)
        self.connection.close()
        self._wake()

    def _check_silence(self) -> None:
        """The server may be silent for `timeout_s`, but not while nothing is taken from it."""
        left_s = self._received_s + self._timeout_s - self._loop.time()
        if left_s <= 0 and not self._is_paused:
            self._fail(f"the server sent nothing for {self._timeout_s:g} s")
        else:
            self._timer = self._loop.call_later(
                left_s if left_s > 0 else self._timeout_s, self._check_silence
            )


def header_of(headers: Headers, name: bytes) -> bytes:
    """A header's value, by its name in lower case; empty: there is none."""
    return next((value for key, value in headers if key == name), b"")


async def connect(address: Address, timeout_s: float) -> UpstreamConnection:
    """A new connection. Raises UpstreamError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                UpstreamConnection, address.host, address.port, ssl=address.has_tls or None
            )
    except TimeoutError:
        raise UpstreamError(f"{address.authority} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise UpstreamError(f"{address.authority} can't be reached ({error.strerror or error})") from None
    return connection
