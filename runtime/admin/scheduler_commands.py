"""Commands to the schedulers of all replicas, and their answers."""

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import anyio

from runtime.actors.replica import Replica
from runtime.errors import RequestError, Unavailable
from runtime.messages.scheduler import ToScheduler

T = TypeVar("T")


class Answer(Generic[T]):
    """An answer that is still to come: a value, or an error in its place."""

    def __init__(self) -> None:
        self._value: T | RequestError | None = None
        self._given = anyio.Event()

    def give(self, value: T | RequestError) -> None:
        """Sets the answer."""
        self._value = value
        self._given.set()

    async def wait(self) -> T | RequestError:
        """Returns the answer when it has come."""
        await self._given.wait()
        return self._value  # type: ignore[return-value]  # it is given


class OpenAnswer(Protocol):
    """An answer of any type, of which only an error is set."""

    def give(self, value: RequestError) -> None:
        """Sets the answer."""
        ...


class SchedulerCommands:
    """Sends commands to the scheduler of each replica. Raises Unavailable while a replica loads, and after
    `close`."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._answers: set[OpenAnswer] = set()
        self._end: RequestError | None = None

    def send(self, command: ToScheduler) -> None:
        """Sends a command that is not answered."""
        self.check()
        for replica in self._replicas:
            replica.inbox.send_nowait(command)

    async def ask(self, command: Callable[[Callable[[T | RequestError], None]], ToScheduler]) -> list[T]:
        """Sends a command to each scheduler; `command` makes it of the function that takes the answer.

        -> the answers, in order of the replicas. Raises the first error when all have answered.
        """
        self.check()
        answers = [Answer[T]() for _ in self._replicas]
        self._answers.update(answers)
        try:
            for replica, answer in zip(self._replicas, answers, strict=True):
                replica.inbox.send_nowait(command(answer.give))
            values: list[T] = []
            errors: list[RequestError] = []
            for answer in answers:
                value = await answer.wait()
                if isinstance(value, RequestError):
                    errors.append(value)
                else:
                    values.append(value)
        finally:
            self._answers.difference_update(answers)
        if errors:
            raise errors[0]
        return values

    def close(self, error: RequestError) -> None:
        """The schedulers answer no more: all that wait for an answer get `error`."""
        self._end = error
        for answer in self._answers:
            answer.give(error)

    def check(self) -> None:
        """Raises Unavailable when no command can be sent."""
        if self._end is not None:
            raise self._end
        if any(replica.scheduler is None for replica in self._replicas):
            raise Unavailable("the model is loading; try again when /health says ready")
