"""What links the actors of one event loop: bounded, typed channels, signals and lists of listeners.

A message that is sent to a channel is received once, in order. A step sends one message, not one per token,
and a receiver takes all messages that wait at once: one await moves any number of messages.
"""

from collections.abc import Callable
from math import inf
from typing import Generic, Self, TypeVar

import anyio
from msgspec import Struct

T = TypeVar("T")


class ChannelStatistics(Struct, frozen=True):
    """Message counts since the channel was made."""

    sent: int
    waiting: int
    peak: int  # most messages that ever waited at once


class Channel(Generic[T]):
    """A queue of at most `capacity` messages; `math.inf` for control messages, which must never wait.

    `async for messages in channel` gives lists of all waiting messages until the channel is closed and empty.
    """

    def __init__(self, capacity: float) -> None:
        if not (capacity == inf or (isinstance(capacity, int) and capacity > 0)):
            raise ValueError(f"capacity is {capacity}; it must be a positive integer or math.inf")
        self.capacity = capacity
        self._sender, self._receiver = anyio.create_memory_object_stream[T](capacity)
        self._sent = 0
        self._received = 0
        self._peak = 0

    def send_nowait(self, message: T) -> None:
        """Raises anyio.WouldBlock when the channel is full, anyio.ClosedResourceError when it is closed."""
        self._sender.send_nowait(message)
        self._count()

    async def send(self, message: T) -> None:
        """Waits for room. Raises anyio.ClosedResourceError when the channel is closed."""
        await self._sender.send(message)
        self._count()

    def _count(self) -> None:
        self._sent += 1
        self._peak = max(self._peak, self._sent - self._received)

    async def drain(self) -> list[T]:
        """Waits for a message. -> all messages that wait then. Raises anyio.EndOfStream when the channel is
        closed and empty."""
        messages = [await self._receiver.receive()]
        try:
            while True:
                messages.append(self._receiver.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream):
            self._received += len(messages)
            return messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[T]:
        try:
            return await self.drain()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    @property
    def statistics(self) -> ChannelStatistics:
        """How many messages were sent, wait now, and have waited at most."""
        return ChannelStatistics(self._sent, max(self._sent - self._received, 0), self._peak)

    def close(self) -> None:
        """No message can be sent any more; waiting ones can still be taken. Idempotent."""
        self._sender.close()

    def discard(self) -> None:
        """Closes both ends and drops waiting messages. For the owner, when no receiver is left. Idempotent."""
        self._sender.close()
        self._receiver.close()


class Signal:
    """An event that can be waited for again and again: each `wait` returns once `set` was called since the
    last one."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    @property
    def is_set(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event.is_set()

    def set(self) -> None:
        """Wakes the task that waits, or the next one that does."""
        self._event.set()

    async def wait(self) -> None:
        """Returns when the signal is set, and clears it."""
        await self._event.wait()
        self._event = anyio.Event()


class Listeners(Generic[T]):
    """Functions to call with each event of one kind, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[T], None]] = []

    def subscribe(self, listener: Callable[[T], None]) -> None:
        """`listener` is called with each event from now on; it must not wait or raise."""
        self._listeners.append(listener)

    def notify(self, event: T) -> None:
        """Calls all listeners before it returns."""
        for listener in self._listeners:
            listener(event)
