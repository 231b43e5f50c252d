"""One end of the stream between two nodes: a TCP connection that is authenticated (handshake.py) and carries
messages in authenticated records (records.py).

Empty messages are heartbeats: a side that receives nothing at all for LOST_S takes the other one as gone, so
a machine that lost its power or its cable is noticed as well as a process that ends.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from runtime.errors import LinkError
from runtime.nodes.handshake import OTHER_SECRET, Handshake
from runtime.nodes.records import Opener, Sealer

HANDSHAKE_S = 10.0  # within which both sides must have proved their secret
HEARTBEAT_S = 5.0
LOST_S = 30.0
WRITE_BYTES = 8 << 20  # that wait to be sent, above which a link has no room


class Link(asyncio.Protocol):
    """A link is made by a connection, opens when both sides have the same secret, and is lost once. Its
    callbacks run on the loop and must not raise."""

    def __init__(self, handshake: Handshake) -> None:
        """Set `on_open`, `on_message`, `on_lost` and `on_room` before the connection is made, or when the
        link opens at the latest."""
        self.on_open: Callable[[], None] = lambda: None
        # of messages that are no heartbeats; may raise LinkError
        self.on_message: Callable[[bytes], None] = lambda message: None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_room: Callable[[], None] = lambda: None
        self.own = self.peer = ""  # addresses of this side, and of the other one
        self.has_room = True  # less than WRITE_BYTES wait to be sent
        self.is_lost = False
        self._handshake = handshake
        self._buffer = bytearray()
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._transport: asyncio.Transport | None = None
        self._received_s = 0.0
        self._is_reading = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether both sides have proved their secret, and the link is not lost."""
        return self._sealer is not None and not self.is_lost

    def send(self, message: bytes) -> None:
        """Sends a message; does nothing when the link is lost. Look at `has_room` before a long one."""
        if self._sealer is not None and self._transport is not None and not self.is_lost:
            self._transport.write(self._sealer.seal(message))

    def close(self, reason: str) -> None:
        """Closes the connection when what was sent has gone out; the link is lost for `reason` now."""
        if self._transport is not None:
            self._transport.close()
        self._lose(reason)

    def abort(self, reason: str) -> None:
        """Cuts the connection; the link is lost for `reason`."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def pause(self) -> None:
        """Reads no more until `resume`: the other side stops sending when the buffers between are full."""
        if self._transport is not None and not self.is_lost:
            self._is_reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads again."""
        if self._transport is not None and not self.is_lost:
            self._is_reading = True
            self._received_s = asyncio.get_running_loop().time()
            self._transport.resume_reading()

    # ── asyncio.Protocol ────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the handshake."""
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.own = (
            str((transport.get_extra_info(name) or ("?",))[0]) for name in ("peername", "sockname")
        )
        self._timer = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, self.abort, f"it did not prove its secret within {HANDSHAKE_S:g} s"
        )
        transport.write(self._handshake.open())

    def data_received(self, data: bytes) -> None:
        """Takes handshake and records."""
        if self.is_lost:
            return
        self._received_s = asyncio.get_running_loop().time()
        self._buffer += data
        try:
            if self._opener is None:
                self._shake_hands()
            if self._opener is not None and not self.is_lost:
                for message in self._opener.open(self._buffer):
                    if message:
                        self.on_message(message)
        except LinkError as error:
            self.abort(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        """The other side, or the network, has ended the connection."""
        self._lose("the connection was closed" if error is None else f"the connection broke: {error}")

    def pause_writing(self) -> None:
        """WRITE_BYTES wait."""
        self.has_room = False

    def resume_writing(self) -> None:
        """They have been sent."""
        self.has_room = True
        self.on_room()

    # ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _shake_hands(self) -> None:
        assert self._transport is not None, "connected"
        if reply := self._handshake.receive(self._buffer):
            self._transport.write(reply)
            if self._handshake.keys is None and not any(reply):
                self.close(OTHER_SECRET)
        if (keys := self._handshake.keys) is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._sealer, self._opener = Sealer(keys.send), Opener(keys.receive)
            self._beat()
            self.on_open()

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        if self._is_reading and loop.time() - self._received_s > LOST_S:
            self.abort(f"nothing came from it for {LOST_S:g} s")
            return
        self.send(b"")
        self._timer = loop.call_later(HEARTBEAT_S, self._beat)

    def _lose(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            if self._timer is not None:
                self._timer.cancel()
            self.on_lost(reason)
