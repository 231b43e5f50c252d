"""Fetches files over http and https, from addresses that were checked.

A name is resolved once; each of its addresses must be allowed, and the connection goes to one of them as
it is: a name server that answers otherwise the second time is not asked a second time. Redirects are followed
by the same rules. No proxy of the environment is used, and no compressed body is taken.
"""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from socket import SOCK_STREAM, gaierror

import anyio
import anyio.streams.tls
import h11
from anyio.abc import ByteStream
from anyio.to_thread import run_sync

from runtime.errors import InvalidRequest
from runtime.media.addresses import is_allowed
from runtime.media.spool import Spool
from runtime.media.url import MAX_CHARS, Target, redirected, target_of

MAX_REDIRECTS = 5
MAX_HEAD_BYTES = 64 << 10
READ_BYTES = 64 << 10
REDIRECTS = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host and port -> addresses
Connect = Callable[[str, int], Awaitable[ByteStream]]  # address and port -> connection


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system's resolver has them. Raises OSError."""
    try:
        found = await anyio.getaddrinfo(host, port, type=SOCK_STREAM)
    except UnicodeError as error:  # a label of over 63 characters
        raise OSError(str(error)) from None
    return list(dict.fromkeys([str(row[4][0]) for row in found]))


async def connect(address: str, port: int) -> ByteStream:
    """A connection to an address. Raises OSError."""
    return await anyio.connect_tcp(address, port)


class Fetcher:
    """Fetches from hosts that may be reached: those in `domains`, or every public one if that is empty."""

    def __init__(
        self, domains: frozenset[str], resolve: Resolve = resolve, connect: Connect = connect
    ) -> None:
        self._domains = domains
        self._resolve = resolve
        self._connect = connect
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, out: Spool) -> None:
        """Writes the body to `out`. Raises InvalidRequest."""
        for _ in range(MAX_REDIRECTS + 1):
            async with self._opened(target_of(url, out.param), out.param) as exchange:
                response = await exchange.response()
                if response.status_code not in REDIRECTS:
                    return await _read_body(exchange, response, out)
                url = redirected(url, _location(response, out.param), out.param)
        raise InvalidRequest(
            f"{out.param} leads on more than {MAX_REDIRECTS} times; give the last URL", param=out.param
        )

    @asynccontextmanager
    async def _opened(self, target: Target, param: str) -> AsyncIterator["Exchange"]:
        address = await self._checked(target, param)
        try:
            stream = await self._connected(target, address)
        except (OSError, ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise _unreachable(target, param, error) from None
        try:
            yield Exchange(stream, target, param)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def _checked(self, target: Target, param: str) -> str:
        """An address of the target. Every address of its name must be allowed: one alone that is not says
        that the name is not what it seems to be."""
        if self._domains and target.host not in self._domains:
            raise InvalidRequest(
                f"{param}: files of {target.host} are not fetched here; --allowed-media-domains names the "
                "hosts that are, or send the file itself as a data URL",
                param=param,
            )
        try:
            addresses = await self._resolve(target.host, target.port)
        except (OSError, gaierror) as error:
            raise _unreachable(target, param, error) from None
        if not addresses or not all(is_allowed(one, target.host, self._domains) for one in addresses):
            raise InvalidRequest(
                f"{param}: {target.host} has no public address, and is not fetched from; the operator may "
                "name it in --allowed-media-domains, or send the file itself as a data URL",
                param=param,
            )
        return addresses[0]

    async def _connected(self, target: Target, address: str) -> ByteStream:
        stream = await self._connect(address, target.port)
        if target.scheme == "http":
            return stream
        if self._tls is None:
            self._tls = await run_sync(ssl.create_default_context)  # reads the system's certificates
        return await anyio.streams.tls.TLSStream.wrap(
            stream, hostname=target.host, ssl_context=self._tls, standard_compatible=False
        )


class Exchange:
    """One GET request and its response."""

    def __init__(self, stream: ByteStream, target: Target, param: str) -> None:
        self.param = param
        self._stream = stream
        self._target = target
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def response(self) -> h11.Response:
        """Sends the request. -> the head of the response. Raises InvalidRequest."""
        headers = [
            ("Host", self._target.authority),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("User-Agent", "runtime"),
            ("Connection", "close"),
        ]
        request = h11.Request(method="GET", target=self._target.path, headers=headers)
        sent = (self._http.send(request) or b"") + (self._http.send(h11.EndOfMessage()) or b"")
        try:
            await self._stream.send(sent)
        except (OSError, anyio.BrokenResourceError) as error:
            raise _unreachable(self._target, self.param, error) from None
        while True:
            event = await self.event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise self._broken()

    async def event(self) -> object:
        """The next event of the response. Raises InvalidRequest."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                raise self._broken() from None
            if event is not h11.NEED_DATA:
                return event
            try:
                part = await self._stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                part = b""
            except (OSError, anyio.BrokenResourceError):
                raise self._broken() from None
            self._http.receive_data(part)

    def _broken(self) -> InvalidRequest:
        return InvalidRequest(
            f"{self.param}: the response of {self._target.host} is incomplete, or none of HTTP",
            param=self.param,
        )


async def _read_body(exchange: Exchange, response: h11.Response, out: Spool) -> None:
    if response.status_code != 200:
        raise InvalidRequest(
            f"{out.param}: the server of the file answered {response.status_code}", param=out.param
        )
    headers = {name: value for name, value in response.headers}
    if headers.get(b"content-encoding", b"identity").lower() not in (b"identity", b""):
        raise InvalidRequest(
            f"{out.param}: the server of the file compresses its response; that is not taken", param=out.param
        )
    declared = headers.get(b"content-length", b"0")  # h11 has checked that it is one number
    out.check(int(declared))
    while not isinstance(event := await exchange.event(), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            raise InvalidRequest(f"{out.param}: the response ends early", param=out.param)
        out.write(bytes(event.data))


def _location(response: h11.Response, param: str) -> str:
    for name, value in response.headers:
        if name == b"location" and len(value) <= MAX_CHARS:
            return value.decode("latin-1")
    raise InvalidRequest(f"{param}: a redirect leads nowhere", param=param)


def _unreachable(target: Target, param: str, error: Exception) -> InvalidRequest:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return InvalidRequest(f"{param}: {target.host} cannot be reached: {reason}", param=param)
