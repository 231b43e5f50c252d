"""What the ranks of one generation say of adapters that they were told to load."""

import anyio

from runtime.adapters.wire import AdapterLoaded
from runtime.errors import Unavailable


class AdapterAnswers:
    """An adapter is loaded when every rank has said so."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._errors: dict[int, list[str]] = {}  # by adapter; empty ones where there was none
        self._news = anyio.Event()
        self.is_over = False

    def add(self, answer: AdapterLoaded) -> None:
        self._errors.setdefault(answer.id, []).append(answer.error)
        self._tell()

    def end(self) -> None:
        """A rank has ended: no more will come from it."""
        self.is_over = True
        self._tell()

    async def wait(self, adapter: int) -> str:
        """Returns when all ranks have it; or why one of them cannot. Raises Unavailable when that will never be known."""
        while len(self._errors.get(adapter, ())) < self._num_ranks:
            if self.is_over:
                raise Unavailable("the ranks ended while the adapter was loaded; try again in a moment")
            await self._news.wait()
        return next((error for error in self._errors.pop(adapter) if error), "")

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
