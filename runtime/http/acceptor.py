"""Accepts connections, up to a limit, from a listening socket.

A connection is a file of the process, and so are the rings and pipes of ranks: without a limit, clients that
connect and send nothing would leave none for ranks that must be started again. Above the limit some spare
connections are accepted, on which the server answers health checks and says to all others that it is full;
above those a connection is answered with 503 and closed at once.

An accept loop that meets an error waits before it tries again: out of files, it would find the same client
waiting, and spin.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct

from runtime import log
from runtime.http.request_cycle import refusal_bytes
from runtime.http.streaming.connection import Connection

BURST = 64  # connections that are accepted in one turn of the event loop
NUM_SPARE = 16  # connections beyond the limit, for health checks
PAUSE_S = 0.2  # after an error
LOG_S = 10.0  # between two lines in the log about the same
HANDSHAKE_S = 15.0  # that TLS may take
ABORTED = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.ENOTCONN})  # the client has left already

Admission = Literal["admitted", "spare", "full"]


class ConnectionLimit:
    """How many connections there are, and may be."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_open = 0
        self.num_refused = 0

    def admit(self) -> Admission:
        """What becomes of one more connection; unless "full" it counts until `release`."""
        if self.num_open >= self.max_connections + NUM_SPARE:
            self.num_refused += 1
            return "full"
        self.num_open += 1
        return "admitted" if self.num_open <= self.max_connections else "spare"

    def release(self) -> None:
        """A connection has ended."""
        self.num_open -= 1


class Acceptor(Struct, frozen=True):
    """Accepts connections of all listening sockets of a server."""

    limit: ConnectionLimit
    tls: ssl.SSLContext | None
    open: Callable[[bool], Connection]  # the protocol of a connection; whether it is a spare one
    tasks: asyncio.TaskGroup
    handshakes: set[asyncio.Task[None]]  # connections that are not open yet, for a TLS handshake above all

    async def run(self, listener: socket.socket) -> None:
        """Accepts connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        logged_s = -LOG_S
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in ABORTED:
                    continue
                if loop.time() - logged_s > LOG_S:
                    logged_s = loop.time()
                    log.get("http").warning("no connection can be accepted", error=error.strerror)
                await asyncio.sleep(PAUSE_S)
                continue
            for accepted in (sock, *_waiting(listener)):
                self._take(accepted)
            await asyncio.sleep(0)  # others have their turn even if clients connect without end

    def _take(self, sock: socket.socket) -> None:
        admission = self.limit.admit()
        if admission == "full":
            if self.limit.num_refused & (self.limit.num_refused - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                log.get("http").warning(
                    "connections are refused; --max-connections are open", refused=self.limit.num_refused
                )
            _refuse(sock, is_plain=self.tls is None)
        else:  # a client may take its time to shake hands
            task = self.tasks.create_task(self._open(sock, is_spare=admission == "spare"))
            self.handshakes.add(task)
            task.add_done_callback(self.handshakes.discard)

    async def _open(self, sock: socket.socket, *, is_spare: bool) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = None if self.tls is None else HANDSHAKE_S
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                lambda: self.open(is_spare), sock, ssl=self.tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # the client has left, or speaks no TLS
            self.limit.release()
            sock.close()


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """Connections that wait to be accepted, up to BURST; an error is left to the next attempt."""
    for _ in range(BURST):
        try:
            sock, _ = listener.accept()
        except OSError:  # BlockingIOError among them: none waits
            return
        sock.setblocking(False)
        yield sock


def _refuse(sock: socket.socket, *, is_plain: bool) -> None:
    with sock:
        if is_plain:
            try:
                sock.send(refusal_bytes(503))
            except OSError:  # the client has left already
                return
