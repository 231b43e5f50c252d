"""What the ranks of one generation say of something that they were all told."""

from typing import Generic, Protocol, TypeVar

import anyio

from runtime.errors import Unavailable


class Answer(Protocol):
    """What one rank says, with the id of what it was told."""

    @property
    def id(self) -> int: ...


T = TypeVar("T", bound=Answer)


class Answers(Generic[T]):
    """Something is answered when every rank has said what became of it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._said: dict[int, list[T]] = {}
        self._news = anyio.Event()
        self.is_over = False

    def add(self, answer: T) -> None:
        self._said.setdefault(answer.id, []).append(answer)
        self._tell()

    def end(self) -> None:
        """A rank has ended: no more will come from it."""
        self.is_over = True
        self._tell()

    async def wait(self, id: int) -> list[T]:
        """Returns when all ranks have answered. Raises Unavailable when they never will."""
        while len(self._said.get(id, ())) < self._num_ranks:
            if self.is_over:
                raise Unavailable("the ranks ended meanwhile; try again in a moment")
            await self._news.wait()
        return self._said.pop(id)

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
