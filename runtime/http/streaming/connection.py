"""A client's connection as its transport shows it: room to write, drained, gone.

In our own server a stream of tokens is written here directly, in the step's fan-out, without a task switch
per token. What is written within one round of the event loop leaves together: one system call for each
connection, however many steps the round has seen. A connection that takes nothing for `stuck_s` seconds is
cut, whatever it was being sent.

The end of what a client sends may mean that it has left, or that it only closed its sending side and waits
for its answer. Which of the two it is, only writing shows: a client that has left answers with a reset. So a
client that closes its sending side before the head of its answer is out is sent an interim response, which
HTTP/1.1 allows at any time, and is checked until the answer is out. Later, in the middle of an answer,
closing means leaving.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Protocol, cast

HIGH_WATER_BYTES = 64 * 1024  # above: deltas are kept back and coalesced
LOW_WATER_BYTES = 16 * 1024
BATCH_BYTES = 16 * 1024  # written at once, without waiting for the end of the event loop's round
UNSENT_BYTES = 128 * 1024  # most that the kernel keeps unsent; without it megabytes hide a slow reader
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, no seconds
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_S, LAST_LOOK_S = (
    0.02,
    1.0,
)  # between checks of a client that may have left, twice as long each time
TCP_CLOSE = 7  # of the kernel's states of a connection: reset, or closed by both


class Input(Protocol):
    """What takes the bytes of a client, in place of the stream reader."""

    def feed(self, data: bytes) -> None:
        """Takes what the client has sent."""
        ...

    def eof(self) -> None:
        """The client sends nothing more."""
        ...


class WriteBatch:
    """Connections with bytes to write at the end of this round of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connections: list[Connection] = []

    def add(self, connection: "Connection") -> None:
        """Has `connection` flushed in the next round."""
        if not self.connections:
            self.loop.call_soon(self._flush)
        self.connections.append(connection)

    def _flush(self) -> None:
        connections, self.connections = self.connections, []
        for connection in connections:
            connection.flush()


class Connection(asyncio.StreamReaderProtocol):
    """Protocol of an accepted connection: feeds its `input`, or without one a stream reader, and informs the
    stream in progress about the transport.

    `is_full` is true while nothing should be written: the write buffer is above its mark or the connection is
    lost. `on_drain` is called when there is room again. `on_leave` is called once, when the client leaves or
    is cut off. `waits_for_head` returns whether an interim response may be sent now; None: the connection
    can't be half closed.
    """

    def __init__(
        self,
        opened: Callable[["Connection", asyncio.StreamReader, asyncio.StreamWriter], None],
        lost: Callable[["Connection"], None],
        stuck_s: float,
        batch: WriteBatch,
    ) -> None:
        """`opened` and `lost` are called once each; `stuck_s`: the longest that a client may take nothing."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**16, loop=loop)
        super().__init__(reader, lambda r, w: opened(self, r, w), loop=loop)
        self.is_full = False
        self.is_lost = False
        self.input: Input | None = None
        self.on_lost = lost
        self.is_reading = True
        self.on_drain: Callable[[], None] | None = None
        self.on_leave: Callable[[], None] | None = None
        self.waits_for_head: Callable[[], bool | None] | None = None
        self.stuck_s = stuck_s
        self.loop = loop
        self.progress = ProgressWatch(self, stuck_s)
        self.close_timer: asyncio.TimerHandle | None = None
        self.batch = batch
        self.unwritten: list[bytes] = []  # to be written at the end of this round
        self.num_unwritten = 0  # bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sets the limits of what is kept unsent. Called by the event loop."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=LOW_WATER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Passes the client's bytes on. Called by the event loop."""
        if self.input is not None:
            self.input.feed(data)
        else:
            super().data_received(data)

    def write(self, data: bytes) -> None:
        """Raw bytes of the response, which leave at the end of this round of the event loop."""
        if not self.unwritten:
            self.batch.add(self)
        self.unwritten.append(data)
        self.num_unwritten += len(data)
        if self.num_unwritten > BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands what was written to the transport."""
        unwritten = self.unwritten
        if not unwritten:
            return
        data = unwritten[0] if len(unwritten) == 1 else b"".join(unwritten)
        unwritten.clear()
        self.num_unwritten = 0
        if not self.is_lost:
            self.transport.write(data)

    def close(self) -> None:
        """Ends the connection when all is sent; with a reset, when the client takes nothing for `stuck_s`."""
        self.flush()
        if not self.is_lost and self.close_timer is None:
            self.transport.close()
            self.close_timer = self.loop.call_later(self.stuck_s, self.cut)

    def cut(self) -> None:
        """Closes at once, with a reset; what is not sent yet is dropped, in the kernel too."""
        if not self.is_lost:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.transport.abort()

    def pause_reading(self) -> None:
        """Reads no more of the client, until `resume_reading`."""
        if self.is_reading and not self.transport.is_closing():
            self.is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads on, where `pause_reading` was called."""
        if not self.is_reading and not self.transport.is_closing():
            self.is_reading = True
            self.transport.resume_reading()

    async def drained(self) -> None:
        """Returns when there is room to write, or the connection is lost."""
        self.flush()
        try:
            await self._drain_helper()  # type: ignore[attr-defined]  # asyncio's types leave it out
        except ConnectionError:
            pass

    def pause_writing(self) -> None:
        """Marks the connection as full. Called by the event loop."""
        super().pause_writing()
        self.is_full = True
        self.progress.start()

    def resume_writing(self) -> None:
        """Lets the stream in progress write again. Called by the event loop."""
        super().resume_writing()
        self.progress.stop()
        self.is_full = False
        if self.on_drain is not None:
            self.on_drain()

    def eof_received(self) -> bool | None:
        """Called by the event loop; returns whether the connection stays open for writing."""
        if self.waits_for_head is None or self.waits_for_head() is None:
            self._leave()
        else:
            HalfClosed(self)
        if self.input is not None:
            self.input.eof()
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop when the connection is closed, from whichever side."""
        self.is_lost = True
        self.is_full = True  # writing now would only fill the log
        self.progress.stop()
        if self.close_timer is not None:
            self.close_timer.cancel()
        super().connection_lost(error)
        self._leave()
        self.on_lost(self)

    def _leave(self) -> None:
        left, self.on_leave = self.on_leave, None
        if left is not None:
            left()


class ProgressWatch:
    """Cuts a connection whose client takes nothing of what waits for it."""

    def __init__(self, connection: Connection, stuck_s: float) -> None:
        self.connection = connection
        self.stuck_s = stuck_s
        self.timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Expects the number of unsent bytes to fall within `stuck_s`, again and again until `stop`."""
        unsent = self.connection.transport.get_write_buffer_size()
        self.timer = self.connection.loop.call_later(self.stuck_s, self._check, unsent)

    def stop(self) -> None:
        """Expects nothing more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _check(self, unsent_before: int) -> None:
        if self.connection.transport.get_write_buffer_size() >= unsent_before:
            self.connection.cut()
        else:
            self.start()


class HalfClosed:
    """Finds out whether a client that sends nothing more is still there, and cuts the connection if not."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.has_asked = False
        connection.loop.call_later(FIRST_LOOK_S, self._look, FIRST_LOOK_S)

    def _look(self, pause_s: float) -> None:
        connection = self.connection
        if connection.is_lost:
            return
        sock = connection.transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            connection.cut()
            return
        if not self.has_asked and connection.waits_for_head is not None and connection.waits_for_head():
            connection.write(INTERIM)
            self.has_asked = True
        connection.loop.call_later(pause_s, self._look, min(2 * pause_s, LAST_LOOK_S))
