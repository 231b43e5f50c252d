"""The HTTP server: accepts connections and speaks HTTP/1.1 (http1.py) and HTTP/2 (http2.py) on them;
hypercorn speaks WebSocket.

A client that leaves is noticed even while requests are pipelined, one that closes its own side only is
answered, request targets may be absolute, heads are bounded however they arrive, and the application has no
lifespan: the caller of `serve` starts and stops it.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from errno import EADDRINUSE
from functools import partial
from math import inf
from typing import cast
from urllib.parse import unquote

import anyio
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import AddressInUse, HeadTooLarge, StartError, Unavailable
from runtime.http.acceptor import Acceptor, ConnectionLimit
from runtime.http.body import respond_early
from runtime.http.errors import error_response
from runtime.http.fields.request_id import request_id, with_request_id
from runtime.http.grace import GRACE_S, cancel_after_grace
from runtime.http.http1 import HTTP2_PREFACE, Http1, Http1Server
from runtime.http.http2 import Http2, Http2Server
from runtime.http.http2_stream import Http2Stream
from runtime.http.hypercorn_connection import HypercornConnection, hypercorn_config
from runtime.http.request_cycle import RequestCycle, refusal_bytes
from runtime.http.request_parser import MAX_HEAD_BYTES, Peer
from runtime.http.streaming.connection import Connection, WriteBatch
from runtime.http.websocket import TERMINATED
from runtime.regular_file import check_regular

LOG = logging.getLogger("runtime.http")

BACKLOG = 2048
SPARE_PATHS = frozenset({"/health", "/ping", "/health_generate", "/metrics"})  # answered even if full
SPARE_IDLE_S = 5.0  # that a connection for them may take to ask
STUCK_S = 30.0  # for which a client may take nothing of what waits for it


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for all addresses of `host`; port 0 takes a free one. Raises StartError."""
    sockets: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            if sockets and port == 0:  # the other addresses of the name get the same port
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
    except OSError as error:
        for sock in sockets:
            sock.close()
        kind = AddressInUse if error.errno == EADDRINUSE else StartError
        raise kind(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from None
    return sockets


def check_address(host: str, port: int) -> None:
    """Listens for a moment, to refuse what `listen` refuses. Raises StartError; AddressInUse where another
    program listens."""
    for sock in listen(host, port):
        sock.close()


def tls_context(
    certfile: str, keyfile: str | None, password: str | None, ca_certs: str | None
) -> ssl.SSLContext:
    """TLS 1.2 or newer, HTTP/2 or HTTP/1.1. With `ca_certs` clients must show a certificate. Raises
    StartError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"])
    options = {"--ssl-certfile": certfile, "--ssl-keyfile": keyfile, "--ssl-ca-certs": ca_certs}
    files = {option: file for option, file in options.items() if file is not None}
    for option, file in files.items():
        try:
            check_regular(file)
        except OSError as error:
            raise StartError(
                f"TLS cannot start with {option} {file} ({error.strerror}); give a PEM file"
            ) from None
    try:
        # without one, OpenSSL would ask the terminal
        context.load_cert_chain(certfile, keyfile, password or "")
        if ca_certs is not None:
            context.load_verify_locations(ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"TLS cannot start with {' or '.join(files.values())} ({reason}); check "
            "--ssl-certfile, --ssl-keyfile, --ssl-keyfile-password and --ssl-ca-certs"
        ) from None
    return context


async def serve(
    app: ASGIApp,
    *,
    sockets: list[socket.socket],
    shutdown: anyio.Event,
    tls: ssl.SSLContext | None = None,
    grace_s: float = GRACE_S,
    remaining_s: Callable[[], float] = lambda: inf,
    stuck_s: float = STUCK_S,
    root_path: str = "",
    has_h2c: bool = False,
    max_connections: int = 8192,
) -> None:
    """Serves `app` on `sockets`, which it closes, until `shutdown`; running answers then have `grace_s` to
    end, and no longer than `remaining_s` says, and FLUSH_S more. `has_h2c`: HTTP/2 is spoken without TLS too.
    Above `max_connections`, only requests for SPARE_PATHS are answered."""
    async with asyncio.TaskGroup() as tasks:  # anyio's takes no tasks from a transport's callback
        server = _Server(app, tasks, stuck_s, root_path, has_h2c, max_connections)
        acceptor = Acceptor(server.limit, tls, server.accept, tasks, set())
        accepting = [tasks.create_task(acceptor.run(sock)) for sock in sockets]
        try:
            await shutdown.wait()
        finally:
            for task in (*accepting, *acceptor.handshakes):
                task.cancel()
            await asyncio.wait(accepting)
            for sock in sockets:
                sock.close()
        async with anyio.create_task_group() as draining:
            end = draining.cancel_scope
            draining.start_soon(cancel_after_grace, end, remaining_s, grace_s)
            await server.drain()
            end.cancel()
        server.cut()


class _Server:
    """The connections that are open, the tasks that serve them, and what they share."""

    def __init__(
        self,
        app: ASGIApp,
        tasks: asyncio.TaskGroup,
        stuck_s: float,
        root_path: str,
        has_h2c: bool,
        max_connections: int,
    ) -> None:
        self.app = app
        self.limit = ConnectionLimit(max_connections)
        self.tasks = tasks
        self.stuck_s = stuck_s
        self.root_path = root_path
        self.config = hypercorn_config(root_path)
        self.context = WorkerContext(None)
        is_stopping = self.context.terminated.is_set
        self.http1 = Http1Server(self._serve_request, is_stopping, has_h2c)
        self.http2 = Http2Server(self._serve_request, is_stopping, stuck_s)
        # each spare connection ends with its first answer
        self.spare_http1 = Http1Server(self._serve_spare, lambda: True)
        self.batch = WriteBatch(asyncio.get_running_loop())
        self.open: dict[Connection, Http1 | Http2 | None] = {}
        self.running: set[asyncio.Task[None]] = set()
        self.emptied = anyio.Event()  # nothing is open or running

    def accept(self, is_spare: bool) -> Connection:
        """The protocol of a new connection. `is_spare`: for health checks, above the limit."""
        opened = partial(self._opened, is_spare=is_spare)
        return Connection(opened, self._lost, self.stuck_s, self.batch)

    def _opened(
        self,
        connection: Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_spare: bool,
    ) -> None:
        peer = _peer_of(writer, self.root_path)
        if peer is None:
            connection.transport.abort()
            return
        if not is_spare:
            self._serve_connection(connection, peer, reader, writer)
            return

        def refuse(_: bytes, __: Scope | None) -> None:
            connection.write(refusal_bytes(503))
            connection.close()

        http1 = Http1(self.spare_http1, connection, peer, refuse)
        self._speak_http1(connection, http1)
        connection.loop.call_later(SPARE_IDLE_S, http1.close_if_idle)

    def _serve_connection(
        self, connection: Connection, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ssl_object = writer.get_extra_info("ssl_object")
        if ssl_object is not None and ssl_object.selected_alpn_protocol() == "h2":
            self._speak_http2(connection, peer).open()
            return

        def hand_over(data: bytes, scope: Scope | None) -> None:
            if scope is not None:
                settings = next((value for name, value in scope["headers"] if name == b"http2-settings"), b"")
                self._speak_http2(connection, peer).upgrade(scope, settings)
            elif data.startswith(HTTP2_PREFACE):
                self._speak_http2(connection, peer).open()
            else:
                self._serve_by_hypercorn(connection, reader, writer, data)
                return
            if connection.input is not None:
                connection.input.feed(data)

        self._speak_http1(connection, Http1(self.http1, connection, peer, hand_over))

    def _speak_http1(self, connection: Connection, http1: Http1) -> None:
        connection.input = http1
        connection.on_leave = http1.leave
        connection.waits_for_head = http1.waits_for_head
        self.open[connection] = http1

    def _speak_http2(self, connection: Connection, peer: Peer) -> Http2:
        http2 = Http2(self.http2, connection, peer)
        connection.input = http2
        connection.on_leave = http2.leave
        connection.waits_for_head = None
        self.open[connection] = http2
        return http2

    def _serve_request(self, cycle: RequestCycle | Http2Stream) -> None:
        self._run(self._answer(cycle, self.app))

    def _serve_spare(self, cycle: RequestCycle | Http2Stream) -> None:
        path = cycle.scope["path"].removeprefix(self.root_path)
        self._run(self._answer(cycle, self.app if path in SPARE_PATHS else refuse_full))

    async def _answer(self, cycle: RequestCycle | Http2Stream, app: ASGIApp) -> None:
        try:
            await _serve(app, cycle.scope, cycle.own_receive, cycle.own_send)
        except Exception:  # of one request: the others go on
            LOG.exception("a request ended in an error")
        finally:
            cycle.give_up()

    def _serve_by_hypercorn(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes
    ) -> None:
        """Hands a connection over; `data` is what its client has sent of the request that is due."""
        connection.flush()
        app = _Entry(self.app, self.context)
        server = HypercornConnection(
            # hypercorn's scopes are TypedDicts, Starlette's are mappings
            cast(AppWrapper, app),
            asyncio.get_running_loop(),
            self.config,
            self.context,
            {},
            reader,
            writer,
        )
        server.close_s = self.stuck_s
        server.over = asyncio.Event()
        connection.input = None
        connection.on_leave = server.leave
        is_plain = writer.get_extra_info("ssl_object") is None
        connection.waits_for_head = server.waits_for_head if is_plain else None
        self.open[connection] = None
        reader.feed_data(data)
        self._run(_drive(connection, server))

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = self.tasks.create_task(work)
        self.running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        self._check_emptied()

    def _lost(self, connection: Connection) -> None:
        self.limit.release()
        self.open.pop(connection, None)
        self._check_emptied()

    def _check_emptied(self) -> None:
        if not self.open and not self.running:
            self.emptied.set()

    async def drain(self) -> None:
        """Closes idle connections now and the others after their answer; returns when all are closed."""
        await self.context.terminated.set()
        for protocol in list(self.open.values()):
            if protocol is not None:
                protocol.close_if_idle()
        while self.open or self.running:
            self.emptied = anyio.Event()
            await self.emptied.wait()

    def cut(self) -> None:
        """Ends what is left."""
        for connection in list(self.open):
            connection.cut()
        for task in self.running:
            task.cancel()


def _peer_of(writer: asyncio.StreamWriter, root_path: str) -> Peer | None:
    """The two ends of a connection; None when the client has left already."""
    sock = writer.get_extra_info("socket")
    try:
        client = parse_socket_addr(sock.family, sock.getpeername())
        server = parse_socket_addr(sock.family, sock.getsockname())
    except OSError:
        return None
    scheme = "http" if writer.get_extra_info("ssl_object") is None else "https"
    return Peer(scheme, client, server, root_path)


async def _drive(connection: Connection, server: HypercornConnection) -> None:
    try:
        await server.run()
    except Exception:  # of one connection: the others go on
        LOG.exception("a connection ended in an error")
    finally:
        connection.cut()


async def refuse_full(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers 503: too many connections are open."""
    error = Unavailable("as many connections are open as this server takes (--max-connections); try again")
    await respond_early(error_response(error, scope["path"]))(
        scope, receive, with_request_id(send, request_id(scope["headers"]))
    )


class _Entry:
    """The application as hypercorn calls it; gives WebSockets a function that waits for the end of the
    server."""

    def __init__(self, app: ASGIApp, context: WorkerContext) -> None:
        self.app = app
        self.context = context

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, sync_spawn: object, call_soon: object
    ) -> None:
        if scope["type"] == "websocket":
            scope["extensions"][TERMINATED] = self.context.terminated.wait
        await _serve(self.app, scope, receive, send)


async def _serve(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """One request, if its head is within the limits."""
    if not scope["path"].startswith("/"):
        _make_relative(scope)
    if scope["type"] == "http" and _head_bytes(scope) > MAX_HEAD_BYTES:
        error = HeadTooLarge(
            f"the head of the request has over {MAX_HEAD_BYTES} bytes, the most that this server takes"
        )
        await respond_early(error_response(error, scope["path"]))(
            scope, receive, with_request_id(send, request_id(scope["headers"]))
        )
        return
    await app(scope, receive, send)


def _make_relative(scope: Scope) -> None:
    """Turns a target with scheme and host, as proxies are sent, into a path; its host becomes the request's
    (RFC 9112, 3.2.2)."""
    target = scope["raw_path"].partition(b"//")
    if target[0].lower() not in (b"http:", b"https:"):
        return
    host, slash, path = target[2].partition(b"/")
    scope["raw_path"] = slash + path or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    scope["headers"] = [(b"host", host), *[header for header in scope["headers"] if header[0] != b"host"]]


def _head_bytes(scope: Scope) -> int:
    """The size of a request's head, about as it was sent."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value) + 4
    return size
