"""Host memory that decoded and prepared files of all requests may take together."""

import asyncio
import weakref
from collections import deque

import anyio
import numpy as np


class ByteBudget:
    """Counts arrays while they live, and has those wait that want more than is free, in the order in which
    they came. `hold` is thread-safe, all else is for the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._used = 0
        self._changes: deque[int] = deque()  # of bytes in use, as they were noted by any thread
        self._waiting: deque[_Waiter] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._used + sum(self._changes)

    async def take(self, num_bytes: int) -> None:
        """Waits until so many bytes are free, and takes them; `hold` or `give_back` ends that. More than
        there are is as good as all of them."""
        self._loop = asyncio.get_running_loop()
        waiter = _Waiter(min(num_bytes, self.max_bytes))
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted.wait()
        except BaseException:  # cancelled
            if waiter.granted.is_set():
                self.give_back(num_bytes)
            else:
                self._waiting.remove(waiter)
                self._grant()
            raise

    def give_back(self, num_bytes: int) -> None:
        """The bytes that `take` took."""
        self._note(-min(num_bytes, self.max_bytes))

    def hold(self, values: np.ndarray) -> None:
        """Counts an array from now on until it is gone."""
        self._note(values.nbytes)
        weakref.finalize(values, self._note, -values.nbytes).atexit = False

    def _note(self, change: int) -> None:
        """From any thread: a deque takes it at once, so nothing is locked where an array ends."""
        self._changes.append(change)
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._grant)

    def _grant(self) -> None:
        while self._changes:
            self._used += self._changes.popleft()
        while self._waiting and self._used + self._waiting[0].num_bytes <= self.max_bytes:
            waiter = self._waiting.popleft()
            self._used += waiter.num_bytes
            waiter.granted.set()


class _Waiter:
    """A file that waits for memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.granted = anyio.Event()
