"""The sink of a request whose output one task reads: the library's."""

import anyio

from runtime.errors import RequestError
from runtime.messages.requests import Delta


class StreamSink:
    """Keeps deltas until the one reader takes them."""

    def __init__(self, num_sequences: int) -> None:
        self._open = num_sequences
        self._deltas: list[Delta] = []
        self._error: RequestError | None = None
        self._changed = anyio.Event()

    def push(self, delta: Delta) -> None:
        """Keeps a delta."""
        self._deltas.append(delta)
        self._open -= delta.finish is not None
        self._changed.set()

    def fail(self, error: RequestError) -> None:
        """Keeps the error."""
        self._error = error
        self._changed.set()

    @property
    def is_over(self) -> bool:
        """Whether all sequences have ended, or the request has failed."""
        return self._open == 0 or self._error is not None

    async def take(self) -> list[Delta]:
        """Waits for deltas. Raises the request's error after the last delta; an empty list is the end."""
        if not self._deltas and not self.is_over:
            await self._changed.wait()
        self._changed = anyio.Event()
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        return deltas
