"""The pages of one prompt on their way from the server that computes it into the prefix tree."""

from collections.abc import Callable

from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import StorageConnector
from runtime.errors import LinkError
from runtime.messages.transfer import (
    Dropped,
    End,
    First,
    Pages,
    PagesAt,
    Parts,
    PartsAt,
    State,
    StateAt,
    ToDecode,
    Waiting,
)
from runtime.transfer.incoming import ANSWERS, Incoming

MAX_PORTION_BYTES = 1 << 30  # of pages behind one message; senders take much less, but for huge pages
NO_ROOM = "host memory has no room for its {}; raise --hicache-size or --hicache-ratio"


class PromptPages:
    """Takes what the other server sends into the cache."""

    def __init__(
        self,
        incoming: Incoming,
        connector: StorageConnector,
        sequence: Sequence,
        end: int,
        take_first: Callable[[Sequence, First, int], None],
    ) -> None:
        """`end`: page of the sequence behind the last one that was asked for; `take_first`: takes the first
        token of the answer, given `end`."""
        self._incoming = incoming
        self._connector = connector
        self._sequence = sequence
        self._end = end
        self._take_first = take_first

    async def receive(self, first: int) -> int:
        """Takes the next pages, from page `first` of the sequence on. -> how many; 0: no more will come.
        Raises LinkError."""
        count, most = 0, self._end - first
        while not count:
            answer = await self._next()
            if isinstance(answer, State | StateAt):
                await self._receive_state(answer, first)
                answer = await self._incoming.wire.receive(ANSWERS)
            if isinstance(answer, End):
                return 0
            if not isinstance(answer, Pages | PagesAt | Parts | PartsAt) or not 0 < answer.count <= most:
                raise LinkError(f"{answer} came where up to {most} pages were due")
            num_bytes = answer.count * self._incoming.layout.page_bytes
            if num_bytes > MAX_PORTION_BYTES and isinstance(answer, Pages | PagesAt):
                raise LinkError(f"{answer.count} pages, {num_bytes} bytes, are too much at once")
            if has_left(self._sequence):
                raise LinkError("its request has ended")
            count = await self._fill(answer, first)
        return count

    async def _next(self) -> ToDecode:
        """What comes next; notices and the first token are taken in."""
        while isinstance(answer := await self._incoming.wire.receive(ANSWERS), Waiting | First):
            if isinstance(answer, First):
                self._take_first(self._sequence, answer, self._end)
            if has_left(self._sequence):
                raise LinkError("its request has ended")
        return answer

    async def _fill(self, announced: Pages | PagesAt | Parts | PartsAt, first: int) -> int:
        """Takes pages into host memory, all at once or section by section. -> how many; 0: they did not
        become whole"""
        reserved, num_adopted = self._connector.reserve(announced.count), 0
        try:
            if len(reserved.hosts) < announced.count:
                raise LinkError(NO_ROOM.format("pages"))
            if isinstance(announced, Pages | PagesAt):
                await self._incoming.fill(announced, reserved.hosts)
                num_adopted = announced.count
            elif await self._fill_sections(announced, reserved.hosts):
                num_adopted = announced.count
        finally:
            self._connector.adopt(self._sequence, first, reserved, num_adopted)
        return num_adopted

    async def _fill_sections(self, announced: Parts | PartsAt, hosts: list[int]) -> bool:
        """Takes sections until the pages are whole. False: they will not be."""
        pages, section = self._incoming.begin(hosts), announced
        while not await pages.take(section):
            answer = await self._next()
            if isinstance(answer, Dropped):
                return False
            if not isinstance(answer, Parts | PartsAt):
                raise LinkError(f"a {type(answer).__name__} came where parts of pages were due")
            section = answer
        return True

    async def _receive_state(self, state: State | StateAt, num_pages: int) -> None:
        """Takes the state behind some of the first `num_pages` pages of the sequence."""
        if not 0 < state.depth <= num_pages or not self._incoming.has_states:
            raise LinkError(f"it sent a state of {state.depth} pages")
        if (reserved := self._connector.reserve_state()) is None:
            raise LinkError(NO_ROOM.format("state"))
        depth = 0
        try:
            await self._incoming.fill_state(state, reserved.place)
            depth = state.depth
        finally:
            self._connector.adopt_state(self._sequence, depth, reserved)


def has_left(sequence: Sequence) -> bool:
    """Whether nothing waits for its pages any more. Those of an answer that has ended with its first token
    still come: the next request of a conversation finds them."""
    return sequence.is_finished and not sequence.num_generated
