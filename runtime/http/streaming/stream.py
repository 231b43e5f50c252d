"""Deltas of one answer on their way to the client."""

from collections.abc import Callable

from runtime.gil import give_way
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import AnswerFormat
from runtime.http.streaming.connection import Connection
from runtime.http.streaming.pace import merged
from runtime.messages.requests import Delta

# tokens and alternatives to them that are kept back of one choice for a slow reader; above, it is cut off
MAX_WAITING_TOKENS = 16_384


class Stream:
    """Deltas on their way to a client: written at once where the connection is ours and has room, else kept
    and coalesced."""

    def __init__(self, answer_format: AnswerFormat, num_choices: int, wake: Callable[[], None]) -> None:
        """`wake` is called when something waits that only the request's task can send, or when too much
        waits."""
        self.answer_format = answer_format
        self.wake = wake
        self.waiting: dict[int, Delta] = {}
        self.num_waiting = 0
        self.max_waiting = MAX_WAITING_TOKENS * num_choices
        self.connection: Connection | None = None
        self.on_overrun: Callable[[], None] | None = (
            None  # called while `connection` is None, if too much waits
        )

    @property
    def is_overrun(self) -> bool:
        """Whether too much waits for the client."""
        return self.num_waiting > self.max_waiting

    def take(self, choice: int, delta: Delta) -> None:
        """Writes a delta, or keeps it until there is room."""
        connection = self.connection
        if connection is None:
            self._keep(choice, delta)
            if self.is_overrun and self.on_overrun is not None:
                self.on_overrun()
            self.wake()
        elif connection.is_full:
            self._keep(choice, delta)
            if self.is_overrun:
                self.wake()
        elif data := self.answer_format.events(choice, delta):
            connection.write(sse.chunked(data))

    def open(self, connection: Connection) -> None:
        """Writes deltas directly to `connection` from now on; the head of the response must have been
        written."""
        self.connection = connection
        connection.on_drain = self._drain
        if not connection.is_full:
            self._drain()

    def close(self) -> None:
        """Writes nothing more to the connection."""
        if self.connection is not None:
            self.connection.on_drain = None
            self.connection = None

    def taken(self) -> dict[int, Delta]:
        """Takes all deltas that wait, by choice."""
        waiting, self.waiting, self.num_waiting = self.waiting, {}, 0
        return waiting

    def written(self, deltas: dict[int, Delta]) -> bytes:
        """The events of deltas."""
        return b"".join([self._events(choice, delta) for choice, delta in deltas.items()])

    def _events(self, choice: int, delta: Delta) -> bytes:
        give_way()
        return self.answer_format.events(choice, delta)

    def _drain(self) -> None:
        assert self.connection is not None
        if data := self.written(self.taken()):
            self.connection.write(sse.chunked(data))

    def _keep(self, choice: int, delta: Delta) -> None:
        self.num_waiting += len(delta.token_ids)
        for token in delta.logprobs or ():
            self.num_waiting += len(token.top) + len(token.picked)
        kept = self.waiting.get(choice)
        if kept is None:
            self.waiting[choice] = delta
        else:
            self.waiting[choice] = merged(kept, delta)
