"""Connections that hypercorn serves on our server: WebSockets."""

import asyncio
import logging

import anyio
import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import WSStream

from runtime.errors import Unavailable
from runtime.http.body_budget import LEASE, BodyLease
from runtime.http.http1 import KEEP_ALIVE_S
from runtime.http.request_parser import MAX_HEAD_BYTES

LOG = logging.getLogger("runtime.http")

READ_BYTES = 2**16
CLOSE_S = 30.0  # that the last bytes may take


class HypercornConnection(TCPServer):
    """A connection of hypercorn that does not wait for a client that has left, and not for long for one that
    takes nothing.

    Hypercorn reads nothing while a pipelined request waits for its turn, and so would not see the end of the
    connection.
    """

    close_s = CLOSE_S
    has_left = False
    handling: anyio.CancelScope | None = None
    over: asyncio.Event  # the client has left, or an answer is complete

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
        """The client has closed its side: what it sent before is still handled, without waiting."""
        self.has_left = True
        self.over.set()
        if self.handling is not None:
            self.handling.cancel()

    async def protocol_send(self, event: Event) -> None:
        """Sends an event of the protocol. Called by hypercorn."""
        await super().protocol_send(event)
        if isinstance(event, Updated) and event.idle:
            self.over.set()

    async def _read_data(self) -> None:
        while not self.reader.at_eof():
            try:
                data = await self.reader.read(READ_BYTES)
            except OSError:
                break
            with anyio.CancelScope() as self.handling:
                if self.has_left:
                    self.handling.cancel()  # takes effect when it waits
                await self.protocol.handle(RawData(data))
            if not self._has_room():
                self.leave()
                break
        protocol = self.protocol.protocol
        while isinstance(protocol, H11Protocol) and protocol.stream is not None and not self.has_left:
            self.over.clear()
            await self.over.wait()  # the client sends no more, and waits for its answer
        with anyio.move_on_after(self.close_s):  # an application that has ended takes no message any more
            await self.protocol.handle(Closed())
        await self.idle_task.stop()  # else the connection lives on for KEEP_ALIVE_S after its client

    def _has_room(self) -> bool:
        """Counts the unfinished message of a WebSocket in its BodyLease. False: all bodies together are too
        large."""
        stream = getattr(self.protocol.protocol, "stream", None)
        if not isinstance(stream, WSStream):
            return True
        lease = stream.scope.get(LEASE)
        try:
            if isinstance(lease, BodyLease):
                lease.hold(stream.buffer.length)
        except Unavailable:
            return False
        return True

    async def _close(self) -> None:
        with anyio.move_on_after(self.close_s):
            await super()._close()


def hypercorn_config(root_path: str) -> Config:
    """Hypercorn's settings: no log of its own, our limits."""
    config = Config()
    config.accesslog = None
    config.errorlog = LOG
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 2**62  # a busy client keeps its connection
    config.h11_max_incomplete_size = MAX_HEAD_BYTES  # incomplete ones; a whole one may be longer
    config.max_app_queue_size = 2  # messages that wait for the application
    config.root_path = root_path
    return config
