"""What links the actors of one event loop: bounded, typed channels, signals and lists of listeners.

A message that is sent to a channel is received once, in order. A step sends one message, not one per token,
and a receiver takes all messages that wait at once: one await moves any number of messages.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Generic, Self, TypeVar

import anyio
from msgspec import Struct

T = TypeVar("T")


class Signal:
    """An event with one waiter, which consumes it."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_set(self) -> bool:
        """Whether `set` was called since the last wait."""
        return self._is_set

    def set(self) -> None:
        """Lets the waiter go on, now or when it comes."""
        self._is_set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when `set` is called, or was since the last wait."""
        while not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_set = False


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
        self._messages: list[T] = []
        self._blocked: deque[tuple[T, asyncio.Future[None]]] = deque()  # senders that wait for room
        self._arrived = Signal()
        self._is_closed = False
        self._sent = 0
        self._peak = 0

    def send_nowait(self, message: T) -> None:
        """Raises anyio.WouldBlock when the channel is full, anyio.ClosedResourceError when it is closed."""
        if self._is_closed:
            raise anyio.ClosedResourceError
        messages = self._messages
        if len(messages) >= self.capacity:
            raise anyio.WouldBlock
        messages.append(message)
        self._sent += 1
        if len(messages) > self._peak:
            self._peak = len(messages)
        self._arrived.set()

    async def send(self, message: T) -> None:
        """Waits for room. Raises anyio.ClosedResourceError when the channel is closed."""
        try:
            self.send_nowait(message)
        except anyio.WouldBlock:
            taken = asyncio.get_running_loop().create_future()
            self._blocked.append((message, taken))
            await taken  # cancelled: the message is left out

    async def drain(self) -> list[T]:
        """Waits for a message. -> all messages that wait then. Raises anyio.EndOfStream when the channel is
        closed and empty."""
        while not self._messages and not self._is_closed:
            await self._arrived.wait()
        if not self._messages:
            raise anyio.EndOfStream
        messages, self._messages = self._messages, []
        while self._blocked:
            message, taken = self._blocked.popleft()
            if not taken.done():
                taken.set_result(None)
                messages.append(message)
                self._sent += 1
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
        """Counts of messages, as of now."""
        return ChannelStatistics(self._sent, len(self._messages), self._peak)

    def close(self) -> None:
        """No message can be sent any more; waiting ones can still be taken. Idempotent."""
        self._is_closed = True
        self._arrived.set()

    def discard(self) -> None:
        """Closes both ends and drops waiting messages. For the owner, when no receiver is left.
        Idempotent."""
        self.close()
        self._messages = []
        while self._blocked:
            _, taken = self._blocked.popleft()
            if not taken.done():
                taken.set_exception(anyio.BrokenResourceError())


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
