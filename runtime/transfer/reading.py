"""Pages and states read from the host memory of another server.

The other side says at which places of its memory they lie, and what lies where (Memory). What is read here
are pieces: bytes that are contiguous in its memory and in ours.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, Protocol

from runtime.devices.host_memory import LAYOUTS, PageGeometry
from runtime.errors import LinkError
from runtime.messages.transfer import Memory, PageLayout, RankMemory, Section

MAX_BUFFERS = 512  # of one system call; Linux takes 1024


class Piece(NamedTuple):
    """Bytes to be read."""

    source: int  # which memory: those of ranks, then those of states
    offset: int  # in it
    target: memoryview


class Reading(Protocol):
    """Reads in the memory of one server."""

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fills the targets of all pieces. In a worker thread. Raises LinkError."""
        ...

    def register(self, buffer: memoryview) -> None:
        """Targets will be parts of this memory, which is none of host memory. Raises LinkError."""
        ...

    def unregister(self, buffer: memoryview) -> None:
        """Ends `register`."""
        ...

    def close(self) -> None:
        """Releases what it holds."""
        ...


class FileReading:
    """Reads files of memory that a server on this machine has passed. They are read by system calls and not
    mapped: a file that its owner cuts short is an error then, and no signal."""

    def __init__(self, fds: Sequence[int]) -> None:
        """`fds`: of the memories in their order; they are closed by `close`."""
        self._fds = list(fds)

    def read(self, pieces: Sequence[Piece]) -> None:
        """See Reading.read."""
        for source, offset, targets in _calls(pieces):
            while targets:
                try:
                    count = os.preadv(self._fds[source], targets, offset)
                except OSError as error:
                    raise LinkError(f"its memory can't be read ({error.strerror})") from None
                if not count:
                    raise LinkError("its memory ends before the page does")
                offset += count
                while targets and count >= len(targets[0]):
                    count -= len(targets.pop(0))
                if count:
                    targets[0] = targets[0][count:]

    def register(self, buffer: memoryview) -> None:
        """See Reading.register."""

    def unregister(self, buffer: memoryview) -> None:
        """See Reading.unregister."""

    def close(self) -> None:
        """See Reading.close."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def address_of(view: memoryview) -> int:
    """Address of the first byte of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Places:
    """Where pages and states are in the memory of another server."""

    def __init__(self, memory: Memory, layout: PageLayout) -> None:
        """Raises LinkError where the two contradict each other."""
        due = [parts for parts in layout.parts for _ in range(layout.num_ranks)]
        if [rank.part_bytes for rank in memory.ranks] != due:
            raise LinkError("the parts of its memory are not those of its pages")
        if tuple(sum(state.part_bytes) for state in memory.states) != layout.state_bytes:
            raise LinkError("the parts of its memory are not those of its states")
        self._num_ranks = layout.num_ranks
        self._ranks = list(map(_geometry, memory.ranks))
        self._states = list(map(_geometry, memory.states))

    @property
    def count(self) -> int:
        """Number of memories."""
        return len(self._ranks) + len(self._states)

    def pages(
        self, places: Sequence[int], targets: Sequence[memoryview], section: Section | None = None
    ) -> Iterator[Piece]:
        """The pieces of pages, or of a section of them; `targets` have the bytes in their order. Raises
        LinkError."""
        if section is None:
            return _pieces(self._ranks, 0, places, None, targets)
        first = section.stage * self._num_ranks
        ranks = self._ranks[first : first + self._num_ranks]
        return _pieces(ranks, first, places, range(section.first, section.end), targets)

    def state(self, place: int, targets: Sequence[memoryview]) -> Iterator[Piece]:
        """The pieces of a state. Raises LinkError."""
        return _pieces(self._states, len(self._ranks), [place], None, targets)


def _geometry(rank: RankMemory) -> PageGeometry:
    if rank.layout not in LAYOUTS or rank.num_pages < 1 or min(rank.part_bytes, default=0) < 1:
        raise LinkError(f"its memory has no layout of this version ({rank.layout})")
    return PageGeometry(rank.num_pages, rank.part_bytes, rank.layout)


def _pieces(
    memories: Sequence[PageGeometry],
    first: int,
    places: Sequence[int],
    parts: range | None,
    targets: Sequence[memoryview],
) -> Iterator[Piece]:
    """`first`: the number of the first one of these memories."""
    for place in places:
        if any(not 0 <= place < one.num_pages for one in memories):
            raise LinkError(f"place {place} is none of its memory")
    rest = iter(targets)
    target = next(rest, memoryview(b""))
    for place, (source, memory) in product(places, enumerate(memories, first)):
        for offset, size in memory.spans(place, parts):
            end = offset + size
            while offset < end:
                while not target:
                    target = next(rest)
                count = min(len(target), end - offset)
                yield Piece(source, offset, target[:count])
                target, offset = target[count:], offset + count


def _calls(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Pieces that lie one behind the other in a memory are read by one call. -> memory, offset, targets"""
    source, begin, end, targets = -1, 0, 0, list[memoryview]()
    for piece in pieces:
        if piece.source != source or piece.offset != end or len(targets) == MAX_BUFFERS:
            if targets:
                yield source, begin, targets
            source, begin, end, targets = piece.source, piece.offset, piece.offset, []
        targets.append(piece.target)
        end += len(piece.target)
    if targets:
        yield source, begin, targets
