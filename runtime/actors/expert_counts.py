"""What the ranks of one generation answer when they are asked how tokens spread over experts."""

import anyio

from runtime.errors import Unavailable
from runtime.messages.ranks import ExpertCounts


class CountAnswers:
    """Answers by the number of the question."""

    def __init__(self) -> None:
        self._answers: dict[int, ExpertCounts] = {}
        self._news = anyio.Event()
        self._is_over = False

    def add(self, answer: ExpertCounts) -> None:
        self._answers[answer.id] = answer
        self._tell()

    def end(self) -> None:
        """A rank has ended: no more will come."""
        self._is_over = True
        self._tell()

    async def take(self, number: int) -> ExpertCounts:
        """Raises Unavailable when it will never come."""
        while number not in self._answers:
            if self._is_over:
                raise Unavailable("the ranks ended while they were asked; try again in a moment")
            await self._news.wait()
        return self._answers.pop(number)

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
