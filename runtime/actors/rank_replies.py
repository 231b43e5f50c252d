"""Replies of the ranks of one generation to commands that they answer one by one."""

from typing import Generic, Protocol, TypeVar

import anyio

from runtime.errors import Unavailable


class Reply(Protocol):
    """A rank's reply, with the id of the command."""

    @property
    def id(self) -> int:
        """Number of the command."""
        ...


R = TypeVar("R", bound=Reply)


class RankReplies(Generic[R]):
    """Collects replies of one type until `num_ranks` ranks have answered a command."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: how many ranks answer each command."""
        self._num_ranks = num_ranks
        self._replies: dict[int, list[R]] = {}
        self._changed = anyio.Event()
        self._is_over = False

    def add(self, reply: R) -> None:
        """A rank has answered. The reply to a command that is no longer waited for is dropped."""
        if (replies := self._replies.get(reply.id)) is not None:
            replies.append(reply)
            self._notify()

    def end(self) -> None:
        """A rank has ended: no more replies will come from it."""
        self._is_over = True
        self._notify()

    async def wait(self, command_id: int) -> list[R]:
        """Returns the replies when all ranks have answered. Raises Unavailable when a rank has ended. Call it
        right after the command was sent, before the event loop can receive a reply."""
        replies = self._replies.setdefault(command_id, [])
        try:
            while len(replies) < self._num_ranks:
                if self._is_over:
                    raise Unavailable("the ranks ended meanwhile; try again in a moment")
                await self._changed.wait()
            return replies
        finally:
            del self._replies[command_id]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
