"""What one prompt gets from the server that computes it, on its way into host memory: bytes that follow a
message, or places of the other server's memory that are read from here."""

from collections.abc import Sequence
from typing import NamedTuple

from anyio import CapacityLimiter, to_thread
from msgspec.msgpack import Decoder

from runtime.errors import LinkError
from runtime.messages.transfer import (
    Held,
    PageLayout,
    Pages,
    PagesAt,
    Parts,
    PartsAt,
    Section,
    State,
    StateAt,
    Taken,
    ToDecode,
)
from runtime.transfer.layout import RankPages, section_of
from runtime.transfer.reading import Piece, Places, Reading
from runtime.transfer.wire import Wire

ANSWERS = Decoder(ToDecode)


class Remote(NamedTuple):
    """The memory of the other server, and what reads in it."""

    reading: Reading
    places: Places


class Incoming:
    """Pages and states of one prompt."""

    def __init__(
        self, wire: Wire, layout: PageLayout, own: RankPages, remote: Remote | None, threads: CapacityLimiter
    ) -> None:
        """`layout`: in which pages come; `remote`: None where bytes are sent."""
        self.wire, self.layout = wire, layout
        self._own = own
        self._remote = remote
        self._threads = threads

    @property
    def has_states(self) -> bool:
        """Whether there are states of recurrent layers."""
        return bool(self._own.layout.state_bytes)

    def close(self) -> None:
        """Ends reading; the connection stays."""
        if self._remote is not None:
            self._remote.reading.close()

    async def fill(self, announced: Pages | PagesAt, hosts: Sequence[int]) -> None:
        """Takes pages into as many host pages. Raises LinkError."""
        pages = self.begin(hosts)
        await self._receive(announced, pages.views(None), pages.buffer)
        await pages.finish()

    def begin(self, hosts: Sequence[int]) -> "ArrivingPages":
        """Host pages to which pages come in sections."""
        return ArrivingPages(self, self._own, hosts, self._threads)

    async def fill_state(self, announced: State | StateAt, place: int) -> None:
        """Takes a state into a place of host memory. Raises LinkError."""
        views = self._own.state(place)
        if isinstance(announced, State):
            await self.wire.receive_pages(views)
        else:
            await self._read(list(self._remote_places().state(announced.place, views)), memoryview(b""))

    async def _receive(
        self, announced: Pages | PagesAt | Parts | PartsAt, views: Sequence[memoryview], buffer: memoryview
    ) -> None:
        """Fills `views`, which are parts of `buffer` if that is not empty."""
        if isinstance(announced, Pages | Parts):
            return await self.wire.receive_pages(views)
        section = announced.section if isinstance(announced, PartsAt) else None
        pieces = self._remote_places().pages(announced.places, views, section)
        await self._read(list(pieces), buffer)

    def _remote_places(self) -> Places:
        if self._remote is None:
            raise LinkError("it named places of a memory that it did not describe")
        return self._remote.places

    async def _read(self, pieces: Sequence[Piece], buffer: memoryview) -> None:
        """Reads, and makes sure that nothing else was written there meanwhile. `buffer`: memory of targets
        that is no host memory; empty: there is none."""
        await to_thread.run_sync(self._read_all, pieces, buffer, limiter=self._threads)
        await self.wire.send(Taken())
        if not isinstance(answer := await self.wire.receive(ANSWERS), Held):
            raise LinkError(f"a {type(answer).__name__} came where Held was due")

    def _read_all(self, pieces: Sequence[Piece], buffer: memoryview) -> None:
        assert self._remote is not None
        reading = self._remote.reading
        if not buffer:
            return reading.read(pieces)
        reading.register(buffer)
        try:
            reading.read(pieces)
        finally:
            reading.unregister(buffer)


class ArrivingPages:
    """Pages on their way into host pages; those of another layout lie in a buffer until they are whole."""

    def __init__(
        self, incoming: Incoming, own: RankPages, hosts: Sequence[int], threads: CapacityLimiter
    ) -> None:
        self._incoming, self._own = incoming, own
        self._layout = incoming.layout
        self._hosts = hosts
        self._threads = threads
        self._num_there = [0] * len(self._layout.parts)  # parts, of each stage
        is_same = self._layout == own.layout
        self.buffer = memoryview(b"" if is_same else bytearray(self._layout.page_bytes * len(hosts)))

    def views(self, section: Section | None) -> list[memoryview]:
        """Where the bytes of a section go, or those of all; page by page."""
        if not self.buffer:
            return self._own.views(self._hosts, section)
        return [self.buffer] if section is None else section_of(self.buffer, self._layout, section)

    async def take(self, announced: Parts | PartsAt) -> bool:
        """Takes a section. -> whether the pages are whole. Raises LinkError."""
        section, parts = announced.section, self._layout.parts
        is_due = (
            announced.count == len(self._hosts)
            and 0 <= section.stage < len(parts)
            and section.first == self._num_there[section.stage] < section.end <= len(parts[section.stage])
        )
        if not is_due:
            raise LinkError(f"{section} of {announced.count} pages came where another one was due")
        await self._incoming._receive(announced, self.views(section), self.buffer)
        self._num_there[section.stage] = section.end
        if self._num_there != list(map(len, parts)):
            return False
        await self.finish()
        return True

    async def finish(self) -> None:
        """Gives all ranks what is theirs, when everything is there."""
        if self.buffer:
            await to_thread.run_sync(self._write, limiter=self._threads)
        elif self._own.needs_copies:
            await to_thread.run_sync(self._own.copy, self._hosts, limiter=self._threads)

    def _write(self) -> None:
        """In a worker thread: writes pages of another layout where they belong."""
        size = self._layout.page_bytes
        for index, host in enumerate(self._hosts):
            self._own.write(host, self.buffer[index * size : (index + 1) * size], self._layout)
