"""HTTP/1.1 to a server behind the router: one request at a time on a connection that is kept open.

Bodies are handed on as they come. A reader takes no more from its socket than its buffer holds while no one
reads, so a slow client slows the server's stream down (backpressure).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from httptools import HttpParserError, HttpResponseParser

from runtime.errors import RuntimeFault

MAX_HEAD_BYTES = 64 * 1024
READ_BYTES = 64 * 1024
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(RuntimeFault):
    """A server could not be reached, broke its answer off, or sent what is no HTTP."""


class Address(Protocol):
    """Where a server listens."""

    host: str
    port: int
    has_tls: bool
    authority: str


class UpstreamConnection:
    """A connection to a server. `is_reused`: it carried an answer before, so the server may have closed it
    for being idle."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.is_reused = False

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed it, as far as is known here."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        """Closes it at once: a server sees that its client has left."""
        self._writer.transport.abort()

    async def request(
        self, method: str, target: bytes, headers: Headers, body: bytes, timeout_s: float
    ) -> "UpstreamAnswer":
        """Sends a request; returns when the head of its answer is here. Raises UpstreamError."""
        lines = [method.encode() + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"content-length: %d" % len(body), b"", body]
        answer = UpstreamAnswer(self, timeout_s, has_body=method != "HEAD")
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(b"\r\n".join(lines))
                await self._writer.drain()
        except TimeoutError:
            raise UpstreamError(f"the server took no request within {timeout_s:g} s") from None
        except OSError as error:
            raise UpstreamError(f"the connection broke ({error})") from None
        await answer.read_head()
        return answer

    async def read(self, timeout_s: float) -> bytes:
        """What has come, at least a byte; empty at the end. Raises UpstreamError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._reader.read(READ_BYTES)
        except TimeoutError:
            raise UpstreamError(f"the server sent nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise UpstreamError(f"the connection broke ({error})") from None


class UpstreamAnswer:
    """An answer: its head, then its body as it comes. Callbacks are httptools'."""

    def __init__(self, connection: UpstreamConnection, timeout_s: float, *, has_body: bool) -> None:
        """`timeout_s`: the longest time without a byte. `has_body` False: an answer to HEAD, whose length is
        of a body that does not come."""
        self.connection = connection
        self.headers: list[tuple[bytes, bytes]] = []
        self._timeout_s, self._has_body = timeout_s, has_body
        self._parser = HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = False
        self._is_complete = False
        self._keeps_alive = False

    @property
    def status(self) -> int:
        """The status code."""
        return int(self._parser.get_status_code())

    @property
    def can_be_kept(self) -> bool:
        """Whether the connection can carry another request."""
        return self._is_complete and self._keeps_alive and self.connection.is_open

    def header(self, name: bytes) -> bytes:
        """A header's value, by its name in lower case; empty: there is none."""
        return next((value for key, value in self.headers if key == name), b"")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is here; of 1xx another one follows."""
        self._has_head = self.status >= 200
        if not self._has_head:
            self.headers.clear()
        self._keeps_alive = self._has_body and self._parser.should_keep_alive()
        if self._has_head and not self._has_body:
            self._is_complete = True

    def on_body(self, piece: bytes) -> None:
        """Takes a part of the body."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._is_complete = self._has_head

    async def read_head(self) -> None:
        """Reads until the head is here. Raises UpstreamError."""
        count = 0
        while not self._has_head:
            count += await self._feed()
            if count > MAX_HEAD_BYTES and not self._has_head:
                raise UpstreamError("the head of the answer is too long")

    async def body(self) -> AsyncIterator[bytes]:
        """The body in pieces, as they come. Raises UpstreamError when it breaks off."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                yield piece
            elif self._is_complete:
                return
            else:
                await self._feed()

    async def _feed(self) -> int:
        data = await self.connection.read(self._timeout_s)
        if not data:
            if self._has_head and not self._keeps_alive and not self._is_framed:
                self._is_complete = True  # a body that ends with its connection
                return 0
            raise UpstreamError("the server closed the connection before its answer was complete")
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            raise UpstreamError(f"the answer is no HTTP ({error})") from None
        return len(data)

    @property
    def _is_framed(self) -> bool:
        return bool(self.header(b"content-length") or self.header(b"transfer-encoding"))


async def connect(address: Address, timeout_s: float) -> UpstreamConnection:
    """A new connection. Raises UpstreamError."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=address.has_tls or None, limit=READ_BYTES
            )
    except TimeoutError:
        raise UpstreamError(f"{address.authority} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise UpstreamError(f"{address.authority} can't be reached ({error.strerror or error})") from None
    return UpstreamConnection(reader, writer)
