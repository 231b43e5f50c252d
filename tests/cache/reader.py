"""The sockets of a KV-aware router, written from the public protocol alone."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


class Reader:
    """Follows a publisher, and asks it for what was missed."""

    def __init__(self, endpoint: str, *, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._news = self._context.socket(zmq.SUB)
        self._news.subscribe(topic)
        self._news.connect(endpoint)
        self._replays = self._context.socket(zmq.DEALER)
        if replay_endpoint is not None:
            self._replays.connect(replay_endpoint)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    async def joined(self, publish: Callable[[], None]) -> None:
        """Has something published until it arrives: a subscription takes its time to get there."""
        publish()
        while not await self._news.poll(20):
            publish()

    async def take(self) -> list[bytes]:
        """topic, number, batch"""
        frames: list[bytes] = await self._news.recv_multipart()
        return frames

    async def take_after(self, number: int) -> list[bytes]:
        """The first message with at least this number."""
        while True:
            frames = await self.take()
            if int.from_bytes(frames[1], "big") >= number:
                return frames

    async def news(self, last: int) -> list[tuple[int, list[Any]]]:
        """(number, events) of what has arrived, or still comes, until batch `last`."""
        found: list[tuple[int, list[Any]]] = []
        while not found or found[-1][0] < last:
            _, number, body = await self.take()
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(body)[1]))
        return found

    async def ask(self, frames: list[bytes]) -> None:
        await self._replays.send_multipart(frames)

    async def replay(self, first: int) -> list[tuple[int, list[Any]]]:
        """(number, events) of the batches from `first` on that the publisher still has."""
        await self.ask([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            empty, number, body = await self._replays.recv_multipart()
            assert empty == b""
            if number == END:
                assert body == b""
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(body)[1]))
