"""The events actor: publishes changes of the prefix cache to KV-aware routers over ZeroMQ, and replays
batches that they have missed.

    PUB     [topic, number, batch]                     number: 8 bytes, big-endian
    ROUTER  [first number]  ->  [number, batch] ...    then END and an empty batch

Batches are msgpack (docs/kv_events.md). No socket ever waits: a PUB socket drops batches for a reader that
has `hwm` batches to read, the inbox drops them when the loop is too busy. In both cases the reader finds a
number missing, and asks for a replay or, if the batch is gone, forgets what it knows.
"""

import time
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING

import anyio
import msgspec
from msgspec import Struct

from runtime import log
from runtime.actors.channels import Channel
from runtime.cache.journal import CacheEvent, CacheEvents
from runtime.errors import OptionsError, install_line
from runtime.metrics import Metrics
from runtime.options.groups.observe import DEFAULT_ENDPOINT, KVEvents

if TYPE_CHECKING:
    import zmq

END = b"\xff" * 8  # minus one
YIELD_EVERY = 64  # batches of a replay after which other tasks get their turn


class EventBatch(Struct, frozen=True, array_like=True):
    """The public schema of a message."""

    ts: float  # unix seconds
    events: list[CacheEvent]
    data_parallel_rank: int


class EventsActor:
    """Publishes CacheEvents that it takes through `offer`; owns the sockets until `close`."""

    def __init__(self, config: KVEvents, metrics: Metrics, replica: int = 0) -> None:
        """Opens the sockets. `replica` is the replica's index, and is added to the ports of TCP endpoints.
        Raises OptionsError."""
        self._zmq = require_zmq()
        self._context = self._zmq.Context()
        self._replica = replica
        self._topic = config.topic.encode()
        self._metrics = metrics
        self._inbox = Channel[CacheEvents](config.max_queue_size)
        self._encoder = msgspec.msgpack.Encoder()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        try:
            self.endpoint, self._publisher = self._open(
                self._zmq.PUB,
                config.endpoint or DEFAULT_ENDPOINT,
                config.hwm,
                binds=config.endpoint is None or _binds(config.endpoint),
            )
            self.replay_endpoint, self._replays = None, None
            if config.replay_endpoint is not None:
                hwm = max(config.hwm, config.buffer_steps + 1)  # room for a whole replay
                self.replay_endpoint, self._replays = self._open(
                    self._zmq.ROUTER, config.replay_endpoint, hwm, binds=True
                )
        except OptionsError:
            self.close()
            raise

    def offer(self, events: CacheEvents) -> None:
        """Publishes the events soon, or drops them when the inbox is full."""
        try:
            self._inbox.send_nowait(events)
        except anyio.WouldBlock:
            self._metrics.kv_event_drops.add(1)

    async def run(self) -> None:
        """Publishes and replays until cancelled."""
        log.get("events").info("publishing", endpoint=self.endpoint, replay=self.replay_endpoint)
        async with anyio.create_task_group() as tasks:
            if self._replays is not None:
                tasks.start_soon(self._serve_replays, self._replays)
            while True:
                for events in await self._inbox.drain():
                    self._publish(events)

    def close(self) -> None:
        """Closes the sockets at once. Idempotent."""
        self._context.destroy(linger=0)
        self._inbox.discard()

    def _open(self, kind: int, endpoint: str, hwm: int, *, binds: bool) -> "tuple[str, zmq.Socket[bytes]]":
        """-> the endpoint with the port that was taken, and the socket"""
        endpoint = _of_replica(endpoint, self._replica)
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            raise OptionsError(
                [
                    f"--kv-events-config: {endpoint} cannot be {'bound' if binds else 'connected to'} "
                    f"({error.strerror}); name another endpoint"
                ]
            ) from None
        return socket.getsockopt_string(self._zmq.LAST_ENDPOINT), socket

    def _publish(self, events: CacheEvents) -> None:
        body = self._encoder.encode(EventBatch(time.time(), events.events, self._replica))
        self._sent.append((events.number, body))
        self._publisher.send_multipart(
            (self._topic, events.number.to_bytes(8, "big"), body), self._zmq.NOBLOCK
        )
        self._metrics.kv_event_batches.add(1)

    async def _serve_replays(self, replays: "zmq.Socket[bytes]") -> None:
        descriptor = replays.getsockopt(self._zmq.FD)
        assert isinstance(descriptor, int)
        while True:
            await anyio.wait_readable(descriptor)
            while True:  # the descriptor signals changes only: all waiting messages must be read
                try:
                    frames = replays.recv_multipart(self._zmq.NOBLOCK)
                except self._zmq.Again:
                    break
                await self._replay(replays, frames)

    async def _replay(self, replays: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        match frames:
            case [reader, b"", first] if len(first) == 8:
                start = int.from_bytes(first, "big")
            case _:
                log.get("events").warning(
                    "a request for a replay is not an empty frame and 8 bytes", frames=len(frames)
                )
                return
        batches = [(number, body) for number, body in self._sent if number >= start]
        for count, (number, body) in enumerate(batches, start=1):
            # dropped if the reader reads none
            replays.send_multipart((reader, b"", number.to_bytes(8, "big"), body), self._zmq.NOBLOCK)
            if count % YIELD_EVERY == 0:
                await anyio.sleep(0)
        replays.send_multipart((reader, b"", END, b""), self._zmq.NOBLOCK)


def _of_replica(endpoint: str, replica: int) -> str:
    """Each replica publishes at an endpoint of its own: the port goes up by its index, other addresses get it
    as a suffix."""
    address, _, port = endpoint.rpartition(":")
    if not replica or port == "*":
        return endpoint
    if endpoint.startswith("tcp://") and port.isdecimal():
        return f"{address}:{int(port) + replica}"
    return f"{endpoint}_dp{replica}"


def _binds(endpoint: str) -> bool:
    """The rule of the systems whose option this is: a wildcard or a file is bound, any other address is a
    collector to connect to."""
    return endpoint.startswith("ipc://") or any(
        wildcard in endpoint for wildcard in ("*", "::", "//0.0.0.0:")
    )


def require_zmq() -> ModuleType:
    """The library that publishes events. Raises OptionsError where it is not installed."""
    try:
        import zmq
    except ImportError:
        raise OptionsError([f"--kv-events-config needs pyzmq: {install_line('kv-events')}"]) from None
    return zmq
