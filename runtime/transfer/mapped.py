"""Memory of servers on this machine, mapped and copied from.

    reading by system calls    0.6 to 0.8 of memcpy: the kernel looks up each page of 4 KiB
    mapping for each prompt    no faster: each page is mapped anew
    mapping once               as fast as memcpy, from the second copy of a page on

So a mapping is kept from one prompt to the next, for as long as its server is asked. Its owner has sealed the
memory against shrinking; what is not sealed is read by system calls, where a file that its owner cuts short
is an error and no signal.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import NamedTuple

import numpy as np

from runtime.errors import LinkError
from runtime.transfer.reading import FileReading, Piece, Reading, address_of

KEPT_S = 10.0  # behind its last use: as long as it is mapped, memory of a server that has ended is not freed


def seal(fds: Sequence[int]) -> None:
    """Lets other servers map this memory: it will never be shorter. Raises LinkError."""
    for fd in fds:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError as error:
            raise LinkError(f"host memory can't be sealed ({error.strerror})") from None


def is_sealed(fd: int) -> bool:
    """Whether a file has been sealed so."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # it is no memory
        return False


class Mapping:
    """A file of memory, mapped to be read. It is unmapped with the last reference."""

    def __init__(self, fd: int, size: int) -> None:
        """Raises OSError, and ValueError for an empty file."""
        self.size = size
        self._bytes = np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), np.uint8)
        self._address = int(self._bytes.ctypes.data)

    def copy(self, offset: int, target: memoryview) -> None:
        """Fills `target`. Raises LinkError."""
        if not 0 <= offset <= self.size - len(target):
            raise LinkError("its memory ends before the page does")
        ctypes.memmove(address_of(target), self._address + offset, len(target))


class MappedReading:
    """Copies from mappings."""

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        """`mappings`: of the memories in their order."""
        self._mappings = list(mappings)

    def read(self, pieces: Sequence[Piece]) -> None:
        """See Reading.read."""
        for source, offset, target in pieces:
            self._mappings[source].copy(offset, target)

    def register(self, buffer: memoryview) -> None:
        """See Reading.register."""

    def unregister(self, buffer: memoryview) -> None:
        """See Reading.unregister."""

    def close(self) -> None:
        """See Reading.close."""
        self._mappings = []


class _Kept(NamedTuple):
    mapping: Mapping
    used_s: float


class Mappings:
    """The memory that is mapped. Thread-safe."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._lock = Lock()
        self._kept: dict[tuple[int, int], _Kept] = {}  # by device and inode, which are taken while it is kept

    def open(self, fds: Sequence[int]) -> Reading:
        """Reads these files, and closes them at once or in the end."""
        if not all(map(is_sealed, fds)):
            return FileReading(fds)
        try:
            reading = MappedReading([self._map(fd) for fd in fds])
        except (OSError, ValueError):  # there are no addresses left, or the file is empty
            return FileReading(fds)
        for fd in fds:
            os.close(fd)
        return reading

    def forget(self) -> None:
        """Drops what has not been used for a while."""
        with self._lock:
            least = self._now() - KEPT_S
            self._kept = {key: kept for key, kept in self._kept.items() if kept.used_s >= least}

    @property
    def count(self) -> int:
        """Number of files that are kept."""
        return len(self._kept)

    def _map(self, fd: int) -> Mapping:
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        with self._lock:
            kept = self._kept.get(key)
            found = kept.mapping if kept is not None and kept.mapping.size == status.st_size else None
            mapping = found or Mapping(fd, status.st_size)
            self._kept[key] = _Kept(mapping, self._now())
        return mapping
