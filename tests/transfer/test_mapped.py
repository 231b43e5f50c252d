"""Memory of another server on this machine, mapped: what is kept, for how long, and what is not mapped."""

import fcntl
import os
from pathlib import Path

import pytest

from runtime.errors import LinkError
from runtime.transfer.mapped import KEPT_S, MappedReading, Mappings, is_sealed, seal
from runtime.transfer.reading import FileReading, Piece
from runtime.transfer.transports import SharedMemory
from tests.transfer.test_reading import memory

SEALABLE = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


def sealed(content: bytes) -> int:
    fd = os.memfd_create("pages", SEALABLE)
    os.write(fd, content)
    seal([fd])
    return fd


def again(fd: int) -> int:
    """A descriptor of this memory as another server has one."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


class Clock:
    """Seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def num_maps(fd: int) -> int:
    """Mappings in this process of a file without a name; another device may have its inode number."""
    inode = f" {os.fstat(fd).st_ino} "
    return sum(
        inode in line and "/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


def test_a_mapping_is_kept_and_shows_what_its_owner_writes() -> None:
    fd, clock = sealed(b"before"), Clock()
    mappings, targets = Mappings(clock), [bytearray(4), bytearray(2)]
    for content in (b"before", b"behind"):
        os.pwrite(fd, content, 0)
        reading = mappings.open([again(fd)])
        assert isinstance(reading, MappedReading) and num_maps(fd) == 1
        reading.read([Piece(0, 2, memoryview(targets[0])), Piece(0, 0, memoryview(targets[1]))])
        reading.close()
        assert bytes(targets[1] + targets[0]) == content
    clock.now = KEPT_S
    mappings.forget()
    assert mappings.count == 1
    clock.now += 1
    mappings.forget()
    assert mappings.count == 0 and num_maps(fd) == 0, "memory of a server that has ended is free"
    os.close(fd)


def test_what_is_being_read_stays_mapped() -> None:
    fd, clock, target = sealed(b"bytes"), Clock(), bytearray(5)
    mappings = Mappings(clock)
    reading = mappings.open([again(fd)])
    clock.now = 2 * KEPT_S
    mappings.forget()
    reading.read([Piece(0, 0, memoryview(target))])
    assert target == b"bytes"
    reading.close()
    assert num_maps(fd) == 0
    os.close(fd)


def test_longer_memory_is_mapped_anew_and_nothing_is_read_beyond_it() -> None:
    fd, mappings, target = sealed(b"12"), Mappings(), bytearray(4)
    with pytest.raises(LinkError, match="ends before"):
        mappings.open([again(fd)]).read([Piece(0, 0, memoryview(target))])
    with pytest.raises(LinkError, match="ends before"):
        mappings.open([again(fd)]).read([Piece(0, -1, memoryview(target)[:1])])
    os.pwrite(fd, b"34", 2)
    mappings.open([again(fd)]).read([Piece(0, 0, memoryview(target))])
    assert target == b"1234"
    os.close(fd)


def test_what_may_become_shorter_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    files = [
        os.memfd_create("pages", SEALABLE),
        os.memfd_create("pages"),
        os.open(tmp_path / "file", os.O_RDONLY),
    ]
    good = sealed(b"bytes")
    for fd in files:
        assert not is_sealed(fd)
        reading = Mappings().open([again(good), fd])
        assert isinstance(reading, FileReading)
        reading.close()
    with pytest.raises(PermissionError):
        os.ftruncate(good, 1)
    os.close(good)


def test_memory_that_cannot_be_sealed_is_not_offered() -> None:
    fd = os.memfd_create("pages")
    with pytest.raises(LinkError, match="can't be sealed"):
        seal([fd])
    os.close(fd)


def test_servers_offer_sealed_memory() -> None:
    (source, fds), transport = memory("page_first", flags=SEALABLE), SharedMemory()
    transport.add(source)
    assert all(map(is_sealed, fds))
    assert not any(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE for fd in fds)
    reading = transport.open(source.memory(b""), [again(fd) for fd in fds])
    assert isinstance(reading, MappedReading)
    transport.tidy()
