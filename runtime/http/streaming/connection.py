"""A client's connection as its transport shows it: room to write, drained, gone.

In our own server a stream of tokens is written here directly, in the step's fan-out, without a task switch
per token. A connection that takes nothing for `stuck_s` seconds is cut, whatever it was being sent.

The end of what a client sends may mean that it has left, or that it has said all and listens. Which of the
two it is, only writing tells: who has left answers with a reset. So a client that closes its side before the
head of its answer is out is sent an interim response, which HTTP/1.1 allows at any time, and looked at until
the answer is out. Later, in the middle of an answer, closing is leaving.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

EXTENSION = "runtime.connection"  # ASGI extension of our own server: (Connection, the server's own send)
HIGH_WATER_BYTES = 64 * 1024  # above: deltas are kept back and coalesced
LOW_WATER_BYTES = 16 * 1024
UNSENT_BYTES = 128 * 1024  # most that the kernel keeps unsent; without it megabytes hide a slow reader
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, no seconds
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_S, LAST_LOOK_S = 0.02, 1.0  # between looks at a client that may have left, twice as long each time
TCP_CLOSE = 7  # of the kernel's states of a connection: reset, or closed by both


class Connection(asyncio.StreamReaderProtocol):
    """Protocol of an accepted connection: feeds hypercorn's reader, and tells the stream in progress about
    the transport.

    `is_full` is true while nothing should be written: the write buffer is above its mark or the connection is
    lost. `on_drain` is called when there is room again. `on_leave` is called once, when the client leaves or
    is cut off. `waits_for_head` tells whether it may be sent an interim response now; None: the connection
    can't be half closed.
    """

    def __init__(
        self,
        opened: Callable[["Connection", asyncio.StreamReader, asyncio.StreamWriter], None],
        stuck_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**16, loop=loop)
        super().__init__(reader, lambda r, w: opened(self, r, w), loop=loop)
        self.is_full = False
        self.is_lost = False
        self.on_drain: Callable[[], None] | None = None
        self.on_leave: Callable[[], None] | None = None
        self.waits_for_head: Callable[[], bool | None] | None = None
        self.stuck_s = stuck_s
        self.loop = loop
        self.stuck_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=LOW_WATER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        super().connection_made(transport)

    def write(self, data: bytes) -> None:
        """Raw bytes of the response body. The head of the response must have been sent before."""
        self.transport.write(data)

    def cut(self) -> None:
        """Closes at once, with a reset; what is not sent yet is dropped, in the kernel too."""
        if not self.is_lost:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_full = True
        self._watch_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        self.is_full = False
        if self.on_drain is not None:
            self.on_drain()

    def eof_received(self) -> bool | None:
        if self.waits_for_head is None or self.waits_for_head() is None:
            self._leave()
        else:
            self.loop.call_later(FIRST_LOOK_S, self._look, FIRST_LOOK_S, False)
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self.is_full = True  # writing now would only fill the log
        self._stop_watching()
        super().connection_lost(error)
        self._leave()

    def _leave(self) -> None:
        left, self.on_leave = self.on_leave, None
        if left is not None:
            left()

    def _look(self, pause_s: float, has_asked: bool) -> None:
        """Whether a client that sends no more is still there."""
        if self.is_lost:
            return
        if (
            self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            == TCP_CLOSE
        ):
            self.cut()
            return
        if not has_asked and self.waits_for_head is not None and self.waits_for_head():
            self.transport.write(INTERIM)
            has_asked = True
        self.loop.call_later(pause_s, self._look, min(2 * pause_s, LAST_LOOK_S), has_asked)

    def _watch_progress(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self.stuck_timer = self.loop.call_later(self.stuck_s, self._check_progress, unsent)

    def _check_progress(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() >= unsent_before:
            self.cut()
        else:
            self._watch_progress()

    def _stop_watching(self) -> None:
        if self.stuck_timer is not None:
            self.stuck_timer.cancel()
            self.stuck_timer = None
