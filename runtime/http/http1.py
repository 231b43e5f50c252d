"""HTTP/1.1 on one connection: requests parsed by llhttp, answered one at a time and in order.

Requests that come while one is answered wait: the parsed ones in a queue, what comes after them as bytes. An
upgrade leaves this protocol: of a WebSocket, `hand_over` gets the bytes from the upgrading request on; of
HTTP/2 without TLS, where it is spoken, the request's scope and the bytes after it.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from msgspec import Struct
from starlette.types import Scope

from runtime.http.request_cycle import EXTENSION, RequestCycle, refusal_bytes
from runtime.http.request_parser import BadRequest, Peer, RequestParser
from runtime.http.streaming.connection import INTERIM, Connection

MAX_BACKLOG_BYTES = 2**17  # of further requests that wait as bytes; above, no more is read
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"
# for idle connections; clients and proxies close theirs earlier, so no request meets a closing one
KEEP_ALIVE_S = 75.0


HandOver = Callable[[bytes, Scope | None], None]


class Http1Server(Struct, frozen=True):
    """What the connections of one server share."""

    run: Callable[[RequestCycle], None]  # serves a request in a task
    is_stopping: Callable[[], bool]  # no request is served after the present one
    has_h2c: bool = False  # HTTP/2 is spoken without TLS


class Http1:
    """The requests of one connection. Takes its bytes from `feed` and writes to the connection."""

    def __init__(self, shared: Http1Server, connection: Connection, peer: Peer, hand_over: HandOver) -> None:
        """`hand_over` is called at most once, and nothing of this object after it."""
        self.shared = shared
        self.connection = connection
        self.is_tls = peer.scheme == "https"
        self.hand_over = hand_over
        self.current: RequestCycle | None = None  # its answer is being written
        self.queue: deque[RequestCycle] = deque()  # parsed requests after it
        self.backlog = bytearray()  # what came after those
        self.upgrade: bytes | None = None  # the request that another protocol shall answer after the queue
        self.failure: int | None = None  # status of the refusal after the queue
        # the beginning of the connection, until it is clear that it is HTTP/1.1
        self.first: bytes | None = b"" if shared.has_h2c and not self.is_tls else None
        self.is_at_end = False  # the client sends nothing more
        self.is_closed = False
        self.requests = RequestParser(peer, self._take, has_h2c=shared.has_h2c and not self.is_tls)
        self.idle = IdleTimer(connection.loop, lambda: self.current is None, self.close)

    def feed(self, data: bytes) -> None:
        """Takes what the client has sent."""
        if self.is_closed or self.failure is not None:
            return
        waits = self.queue or self.backlog or self.upgrade is not None
        if waits or (self.current is not None and self.current.has_whole_body):
            self.backlog += data
            if len(self.backlog) > MAX_BACKLOG_BYTES:
                self.connection.pause_reading()
            return
        if self.first is not None:
            data = self.first + data
            if HTTP2_PREFACE.startswith(data[: len(HTTP2_PREFACE)]):
                self.first = data
                if len(data) >= len(HTTP2_PREFACE):
                    self._leave_protocol(data)
                return
            self.first = None
        self._parse(data)

    def eof(self) -> None:
        """The client sends nothing more; the requests that it has sent are answered."""
        self.is_at_end = True
        if self.is_closed:
            return
        if self.current is None:
            self._finish()
        elif not self.current.has_whole_body:
            self._fail(400)

    def leave(self) -> None:
        """The client has left: nothing is answered any more."""
        self.is_closed = True
        self.idle.stop()
        self.queue.clear()
        self.backlog.clear()
        if self.current is not None:
            self.current.disconnect()
        else:
            self.connection.close()

    def close(self) -> None:
        """Ends the connection when what was written is sent."""
        self.is_closed = True
        self.idle.stop()
        self.connection.close()

    def close_if_idle(self) -> None:
        """Closes now, or after the present answer."""
        if self.current is None:
            self.close()

    def waits_for_head(self) -> bool | None:
        """Whether the client waits for the head of its answer; None: it is in the middle of one."""
        if self.is_tls or self.is_closed:
            return None
        if self.current is None:
            return False
        return None if self.current.is_started or self.current.scope["http_version"] == "1.0" else True

    def _parse(self, data: bytes) -> None:
        requests = self.requests
        try:
            rest = requests.parse(data)
        except BadRequest as error:
            self._fail(error.status)
            return
        if rest is not None:
            if requests.upgrade_head is None:
                requests.restart()  # an upgrade to something that is not spoken here: a request like others
                if rest:
                    self.feed(rest)
                return
            self.upgrade = requests.upgrade_head + rest
            if self.current is None:
                self._finish()
        elif self.current is not None:
            self._continue()

    def _continue(self) -> None:
        """Sends 100 Continue to a client that waits for it before it sends its body."""
        if self.requests.expecting is self.current and self.current is not None:
            self.requests.expecting = None
            self.connection.write(INTERIM)

    def _take(self, scope: Scope, keeps_alive: bool) -> RequestCycle:
        cycle = RequestCycle(
            self.connection, scope, self._ended, keeps_alive=keeps_alive and not self.shared.is_stopping()
        )
        if not self.is_tls and scope["http_version"] == "1.1":
            scope["extensions"][EXTENSION] = cycle
        if self.current is None:
            self.current = cycle
            self.shared.run(cycle)
        else:
            self.queue.append(cycle)
        return cycle

    def _ended(self, cycle: RequestCycle) -> None:
        """The answer is complete, or given up."""
        self.current = None
        if self.is_closed or not (cycle.keeps_alive and cycle.has_whole_body) or self.shared.is_stopping():
            self.close()
        else:
            self._finish()

    def _finish(self) -> None:
        """Goes on with what waits while nothing is answered."""
        if self.queue:
            self.current = cycle = self.queue.popleft()
            self.shared.run(cycle)
            self._continue()
            if not cycle.has_whole_body:
                self._parse_backlog()
                if self.is_at_end and not cycle.has_whole_body:
                    self._fail(400)
        elif self.failure is not None:
            self._refuse(self.failure)
        elif self.upgrade is not None:
            self._leave_protocol(self.upgrade + self.backlog)
        elif self.backlog:
            self._parse_backlog()
            if self.current is None and self.is_at_end and not self.is_closed:
                self._finish()
        elif not self.is_at_end:
            self.idle.start()
        elif self.requests.is_in_head or self.first:
            self._refuse(400)
        else:
            self.close()

    def _parse_backlog(self) -> None:
        data = bytes(self.backlog)
        self.backlog.clear()
        self.connection.resume_reading()
        if data:
            self._parse(data)

    def _fail(self, status: int) -> None:
        """What came is no request: it is refused after those before it, and the connection ends."""
        self.failure = status
        self.backlog.clear()
        current, broken = self.current, self.requests.incoming
        if broken is not None and not broken.has_whole_body and broken in self.queue:
            self.queue.remove(broken)
        if current is None:
            self._finish()
        elif not current.has_whole_body:
            if not current.is_started:
                current.refuse(status)
            else:
                self.close()
            current.disconnect()

    def _refuse(self, status: int) -> None:
        self.connection.write(refusal_bytes(status))
        self.close()

    def _leave_protocol(self, data: bytes) -> None:
        self.is_closed = True
        self.idle.stop()
        self.hand_over(data, self.requests.upgrade_scope)


class IdleTimer:
    """Closes a connection on which no request has come for KEEP_ALIVE_S. One timer for many requests: it is
    not moved with each of them, but started again when it fires too early."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, is_idle: Callable[[], bool], close: Callable[[], None]
    ) -> None:
        self.loop = loop
        self.is_idle = is_idle
        self.close = close
        self.timer: asyncio.TimerHandle | None = None
        self.until_s = 0.0
        self.start()

    def start(self) -> None:
        """The connection is idle from now on."""
        self.until_s = self.loop.time() + KEEP_ALIVE_S
        if self.timer is None:
            self.timer = self.loop.call_at(self.until_s, self._check)

    def stop(self) -> None:
        """The connection is closed."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _check(self) -> None:
        self.timer = None
        if not self.is_idle():
            return  # the end of the answer starts the timer again
        if self.until_s > self.loop.time():
            self.timer = self.loop.call_at(self.until_s, self._check)
        else:
            self.close()
