"""Our own server: a small shell that accepts connections and hands them to hypercorn's protocols (HTTP/1.1,
HTTP/2).

It adds to hypercorn's own: plain HTTP/1.1 connections can be written to directly (see connection.py), a
client that leaves is noticed even while requests are pipelined, one that closes its own side only is
answered, request targets may be absolute, heads are bounded whatever their pieces, and the application has no
lifespan: whoever calls `serve` starts and stops it.
"""

import asyncio
import logging
import socket
import ssl
from typing import Any
from urllib.parse import unquote

import anyio
import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from starlette.types import ASGIApp

from runtime.errors import HeadTooLarge, StartError
from runtime.http.body import refusing
from runtime.http.errors import error_response
from runtime.http.fields.request_id import request_id, telling_id
from runtime.http.streaming.connection import EXTENSION, Connection
from runtime.http.websocket import TERMINATED

LOG = logging.getLogger("runtime.http")

BACKLOG = 2048
READ_BYTES = 2**16
MAX_HEAD_BYTES = 2**16  # of a request: its target and headers
GRACE_S = 30.0  # for running answers, after shutdown was asked for
STUCK_S = 30.0  # that a client may take nothing of what waits for it
# for idle connections; clients and proxies close theirs earlier, so no request meets a closing one
KEEP_ALIVE_S = 75.0


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for all addresses of `host`; port 0 takes a free one. Raises StartError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            if sockets and port == 0:  # the other addresses of the name get the same port
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from None
    return sockets


def tls_context(
    certfile: str, keyfile: str | None, password: str | None, ca_certs: str | None
) -> ssl.SSLContext:
    """TLS 1.2 or newer, HTTP/2 or HTTP/1.1. With `ca_certs` clients must show a certificate. Raises
    StartError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        # without one, OpenSSL would ask the terminal
        context.load_cert_chain(certfile, keyfile, password or "")
        if ca_certs is not None:
            context.load_verify_locations(ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = " or ".join(file for file in (certfile, keyfile, ca_certs) if file is not None)
        raise StartError(
            f"TLS cannot start with {files} ({getattr(error, 'strerror', None) or error}); check --ssl-certfile, "
            "--ssl-keyfile, --ssl-keyfile-password and --ssl-ca-certs"
        ) from None
    return context


async def serve(
    app: ASGIApp,
    *,
    sockets: list[socket.socket],
    shutdown: anyio.Event,
    tls: ssl.SSLContext | None = None,
    grace_s: float = GRACE_S,
    stuck_s: float = STUCK_S,
    root_path: str = "",
) -> None:
    """Serves `app` on `sockets`, which it closes, until `shutdown`; running answers then have `grace_s` to
    end."""
    async with asyncio.TaskGroup() as tasks:  # anyio's takes no tasks from a transport's callback
        shell = _Shell(app, tasks, stuck_s, root_path)
        servers = [
            await asyncio.get_running_loop().create_server(shell.accept, sock=sock, ssl=tls, backlog=BACKLOG)
            for sock in sockets
        ]
        try:
            await shutdown.wait()
        finally:
            for server in servers:
                server.close()
        with anyio.move_on_after(grace_s):
            await shell.drain()
        shell.cut()


class _Shell:
    """The connections that are open, and what they share."""

    def __init__(self, app: ASGIApp, tasks: asyncio.TaskGroup, stuck_s: float, root_path: str) -> None:
        self.app = app
        self.tasks = tasks
        self.stuck_s = stuck_s
        self.config = _config(root_path)
        self.context = WorkerContext(None)
        self.open: dict[Connection, asyncio.Task[None]] = {}
        self.last_closed = anyio.Event()

    def accept(self) -> Connection:
        return Connection(self._opened, self.stuck_s)

    def _opened(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        is_plain = writer.get_extra_info("ssl_object") is None
        app = _Entry(self.app, connection if is_plain else None, self.context)
        server = _Server(app, asyncio.get_running_loop(), self.config, self.context, {}, reader, writer)
        server.close_s = self.stuck_s
        server.over = asyncio.Event()
        connection.on_leave = server.leave
        connection.waits_for_head = server.waits_for_head if is_plain else None
        self.open[connection] = self.tasks.create_task(self._run(connection, server))

    async def _run(self, connection: Connection, server: "_Server") -> None:
        try:
            await server.run()
        except Exception:  # of one connection: the others go on
            LOG.exception("a connection ended in an error")
        finally:
            connection.cut()
            del self.open[connection]
            if not self.open:
                self.last_closed.set()

    async def drain(self) -> None:
        """Closes idle connections now and the others after their answer; returns when all are closed."""
        await self.context.terminated.set()
        while self.open:
            self.last_closed = anyio.Event()
            await self.last_closed.wait()

    def cut(self) -> None:
        """Ends what is left."""
        for connection, task in self.open.items():
            connection.cut()
            task.cancel()


class _Entry:
    """The application as hypercorn calls it; offers the connection where it may be written to directly, and
    tells sockets of the end."""

    def __init__(self, app: ASGIApp, connection: Connection | None, context: WorkerContext) -> None:
        self.app = app
        self.context = context
        self.connection = connection

    async def __call__(self, scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
        if not scope["path"].startswith("/"):
            _make_relative(scope)
        if scope["type"] == "http" and _head_bytes(scope) > MAX_HEAD_BYTES:
            error = HeadTooLarge(
                f"the head of the request has over {MAX_HEAD_BYTES} bytes, the most that this server takes"
            )
            await refusing(error_response(error, scope["path"]))(
                scope, receive, telling_id(send, request_id(scope["headers"]))
            )
            return
        if self.connection is not None and scope["type"] == "http" and scope["http_version"] == "1.1":
            scope["extensions"][EXTENSION] = (self.connection, send)
        elif scope["type"] == "websocket":
            scope["extensions"][TERMINATED] = self.context.terminated.wait
        await self.app(scope, receive, send)


def _make_relative(scope: Any) -> None:
    """A target with scheme and host, as proxies are sent: what counts is its path, and its host is the
    request's (RFC 9112, 3.2.2)."""
    target = scope["raw_path"].partition(b"//")
    if target[0].lower() not in (b"http:", b"https:"):
        return
    host, slash, path = target[2].partition(b"/")
    scope["raw_path"] = slash + path or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    scope["headers"] = [(b"host", host), *[header for header in scope["headers"] if header[0] != b"host"]]


def _head_bytes(scope: Any) -> int:
    """About as many as came."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value) + 4
    return size


class _Server(TCPServer):
    """Hypercorn's connection, which waits for no client that has left, and not for long for one that takes
    nothing.

    Hypercorn reads nothing while a pipelined request waits for its turn, and so would not see the end of the
    connection.
    """

    close_s = STUCK_S  # that the last bytes may take
    has_left = False
    handling: anyio.CancelScope | None = None
    over: asyncio.Event  # the client has left, or an answer is out

    def waits_for_head(self) -> bool | None:
        """Whether an HTTP/1.1 client waits for the head of its answer; None: it is in the middle of one, or
        speaks something else."""
        if not hasattr(self, "protocol"):  # nothing has been read yet
            return False
        protocol = self.protocol.protocol
        h1 = protocol.connection if isinstance(protocol, H11Protocol) else None
        if (
            not isinstance(h1, h11.Connection)
            or h1.our_state is h11.SEND_BODY
            or h1.their_http_version == b"1.0"
        ):
            return None
        return h1.our_state is h11.SEND_RESPONSE

    def leave(self) -> None:
        """The client has closed: what was sent before is still handled, but nothing waits any more."""
        self.has_left = True
        self.over.set()
        if self.handling is not None:
            self.handling.cancel()

    async def protocol_send(self, event: Event) -> None:
        await super().protocol_send(event)
        if isinstance(event, Updated) and event.idle:
            self.over.set()

    async def _read_data(self) -> None:
        while not self.reader.at_eof():
            try:
                data = await self.reader.read(READ_BYTES)
            except OSError:
                break
            self._keep_streams_apart()
            with anyio.CancelScope() as self.handling:
                if self.has_left:
                    self.handling.cancel()  # takes effect when it waits
                await self.protocol.handle(RawData(data))
        protocol = self.protocol.protocol
        while isinstance(protocol, H11Protocol) and protocol.stream is not None and not self.has_left:
            self.over.clear()
            await self.over.wait()  # it has said all, and listens
        await self.protocol.handle(Closed())
        await self.idle_task.stop()  # else the connection lives on for KEEP_ALIVE_S after its client

    def _keep_streams_apart(self) -> None:
        """Over HTTP/2 the rest of a body may come when its answer, a refusal, has ended. To hypercorn that is
        an error of the connection, which would end all other streams."""
        protocol = self.protocol.protocol
        if isinstance(protocol, H2Protocol) and not isinstance(protocol.streams, _Streams):
            protocol.streams = _Streams(protocol.streams)

    async def _close(self) -> None:
        with anyio.move_on_after(self.close_s):
            await super()._close()


class _Streams(dict[int, Any]):
    """HTTP/2 streams by number. What comes for one that has ended is thrown away."""

    def __missing__(self, _: int) -> "_Streams":
        return self

    async def handle(self, _: Any) -> None:
        """As streams have it."""


def _config(root_path: str) -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = LOG
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 2**62  # a busy client keeps its connection
    config.h11_max_incomplete_size = MAX_HEAD_BYTES  # in pieces; in one, it may be twice as long
    config.root_path = root_path
    return config
