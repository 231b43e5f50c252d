"""What one prompt gets from the server that computes it, on its way into host memory: bytes that follow a
message, or places of the other server's memory that are read from here."""

from collections.abc import Sequence
from typing import NamedTuple

from anyio import CapacityLimiter, to_thread
from msgspec.msgpack import Decoder

from runtime.errors import LinkError
from runtime.messages.transfer import Held, PageLayout, Pages, PagesAt, State, StateAt, Taken, ToDecode
from runtime.transfer.layout import RankPages, split
from runtime.transfer.reading import Piece, Places, Reading
from runtime.transfer.wire import Bytes, Wire

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

    def close(self) -> None:
        """Ends reading; the connection stays."""
        if self._remote is not None:
            self._remote.reading.close()

    async def fill(self, announced: Pages | PagesAt, hosts: Sequence[int]) -> None:
        """Takes pages into as many host pages. Raises LinkError."""
        is_same = self.layout == self._own.layout
        if is_same:
            records = [self._own.page(host) for host in hosts]
            buffer = memoryview(b"")
        else:
            size = self.layout.page_bytes
            buffer = memoryview(bytearray(size * len(hosts)))
            pages = [buffer[at : at + size] for at in range(0, len(buffer), size)]
            records = [Bytes([page], split(page, self.layout)) for page in pages]
        if isinstance(announced, Pages):
            await self.wire.receive_pages(records)
        else:
            places = self._remote_places()
            pieces = [
                piece
                for place, record in zip(announced.places, records, strict=True)
                for piece in places.page(place, record.views)
            ]
            await self._read(pieces, buffer)
        if not is_same:
            await to_thread.run_sync(self._write, hosts, records, limiter=self._threads)
        elif self._own.needs_copies:
            await to_thread.run_sync(self._own.copy, hosts, limiter=self._threads)

    async def fill_state(self, announced: State | StateAt, place: int) -> None:
        """Takes a state into a place of host memory. Raises LinkError."""
        record = self._own.state(place)
        if isinstance(announced, State):
            await self.wire.receive_pages([record])
        else:
            pieces = list(self._remote_places().state(announced.place, record.views))
            await self._read(pieces, memoryview(b""))

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

    def _write(self, hosts: Sequence[int], records: Sequence[Bytes]) -> None:
        """In a worker thread: writes pages of another layout where they belong."""
        for host, record in zip(hosts, records, strict=True):
            self._own.write(host, record.views[0], self.layout)
