"""Reading in the memory of another server: pieces of every layout, and what it may lie about."""

import os
from itertools import product

import pytest

from runtime.devices.host_memory import HostPages
from runtime.errors import LinkError
from runtime.messages.transfer import Memory, PageLayout, RankMemory, Section
from runtime.transfer.layout import RankPages
from runtime.transfer.reading import FileReading, Piece, Places

PARTS = (24, 8, 40, 8)
LAYOUTS = ["layer_first", "page_first", "page_first_kv_split"]


def memory(layout: str, num_ranks: int = 2, flags: int = os.MFD_CLOEXEC) -> tuple[RankPages, list[int]]:
    """Three pages and two states of random bytes on each rank. -> and the descriptors"""
    fds, ranks, states = list[int](), list[HostPages](), list[HostPages]()
    for parts, pages, num_pages in ((PARTS, ranks, 3), ((16,), states, 2)):
        for _ in range(num_ranks):
            fds.append(os.memfd_create("pages", flags))
            os.write(fds[-1], os.urandom(num_pages * sum(parts)))
            pages.append(HostPages(fds[-1], num_pages, parts, layout))
    own = RankPages(ranks, states, 8, 1, num_heads=num_ranks, fds=fds[:num_ranks], state_fds=fds[num_ranks:])
    return own, own.fds


@pytest.mark.parametrize(("theirs", "own"), list(product(LAYOUTS, LAYOUTS)))
def test_pages_of_every_layout(theirs: str, own: str) -> None:
    (source, fds), (target, _) = memory(theirs), memory(own)
    places, reading = Places(source.memory(b""), source.layout), FileReading(fds)
    reading.read(list(places.pages([2, 0], target.views([1, 2]))))
    reading.read(list(places.state(1, target.state(0))))
    assert b"".join(target.views([1, 2])) == b"".join(source.views([2, 0]))
    assert b"".join(target.state(0)) == b"".join(source.state(1))
    for section in (Section(0, 1, 3), Section(0, 0, 1), Section(0, 3, 4)):
        reading.read(list(places.pages([1], target.views([0], section), section)))
    reading.close()
    assert b"".join(target.views([0])) == b"".join(source.views([1]))


def test_pages_side_by_side_are_read_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    (source, fds), (target, _) = memory("page_first", 1), memory("page_first", 1)
    places, reading, read = Places(source.memory(b""), source.layout), FileReading(fds), os.preadv
    counts: list[int] = []
    monkeypatch.setattr(os, "preadv", lambda *asked: counts.append(len(asked[1])) or read(*asked))
    reading.read(list(places.pages([0, 1, 2], target.views([0, 2, 1]))))
    reading.close()
    assert counts == [3] and b"".join(target.views([0, 2, 1])) == b"".join(source.views([0, 1, 2]))


def test_ranks_with_the_same_heads_are_read_once() -> None:
    fds = [os.memfd_create("pages") for _ in range(4)]
    for fd in fds:
        os.write(fd, bytes(80))
    ranks = [HostPages(fd, 1, PARTS, "page_first") for fd in fds]
    own = RankPages(ranks, [], 8, 1, num_heads=2, fds=fds)
    assert own.fds == fds[::2] and len(own.memory(b"").ranks) == 2 and len(own.memories) == 4
    for fd in fds:
        os.close(fd)


def test_memory_that_ends_early_is_an_error() -> None:
    (source, fds), (target, _) = memory("page_first"), memory("page_first")
    places, reading = Places(source.memory(b""), source.layout), FileReading(fds)
    os.ftruncate(fds[1], 100)
    with pytest.raises(LinkError, match="ends before"):
        reading.read(list(places.pages([2], target.views([1]))))
    reading.close()
    with pytest.raises(IndexError):  # nothing is open any more
        reading.read([Piece(0, 0, memoryview(bytearray(1)))])


@pytest.mark.parametrize("place", [-1, 3, 2**40])
def test_a_place_beyond_the_memory_is_an_error(place: int) -> None:
    (source, _), (target, _) = memory("page_first"), memory("page_first")
    places = Places(source.memory(b""), source.layout)
    with pytest.raises(LinkError, match="none of its memory"):
        list(places.pages([place], target.views([1])))


LAYOUT = PageLayout(8, 1, (PARTS,), (16,))
RANK, STATE = RankMemory(3, PARTS, "page_first"), RankMemory(2, (16,), "page_first")


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (Memory(b"", (RANK, RANK), (STATE,)), "of its pages"),
        (Memory(b"", (RankMemory(3, (24, 8, 40), "page_first"),), (STATE,)), "of its pages"),
        (Memory(b"", (RANK,), ()), "of its states"),
        (Memory(b"", (RANK,), (RankMemory(2, (1 << 40,), "page_first"),)), "of its states"),
        (Memory(b"", (RankMemory(0, PARTS, "page_first"),), (STATE,)), "no layout"),
        (Memory(b"", (RankMemory(3, PARTS, "sideways"),), (STATE,)), "no layout"),
    ],
)
def test_what_contradicts_itself_is_an_error(lie: Memory, message: str) -> None:
    Places(Memory(b"", (RANK,), (STATE,)), LAYOUT)
    with pytest.raises(LinkError, match=message):
        Places(lie, LAYOUT)
