"""Bytes in memory without a name, which other processes may be given by their descriptor (memfd_create(2)).

Megabytes that a client sends are no Python objects here: calls that write and read them leave the interpreter
to other threads, and a process that decodes them gets them without a copy.
"""

import fcntl
import os

from runtime.errors import Unavailable

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class MemoryFile:
    """Bytes that are appended, and read at any place. They live until `close`, or as long as this object."""

    __slots__ = ("fd", "num_bytes")

    def __init__(self) -> None:
        """Raises Unavailable where the process has too many open files."""
        self.fd = -1
        self.num_bytes = 0
        try:
            self.fd = os.memfd_create("runtime", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _no_room(error) from None

    def append(self, part: bytes | memoryview) -> None:
        """Adds bytes at the end. Raises Unavailable where the system has no memory for them."""
        view = memoryview(part)
        try:
            while view:
                written = os.write(self.fd, view)
                self.num_bytes += written
                view = view[written:]
        except OSError as error:
            raise _no_room(error) from None

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` up to `end`."""
        return read_at(self.fd, begin, end)

    def seal(self) -> None:
        """From now on nothing changes the bytes, also in other processes that have the descriptor."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        """Gives the descriptor back, and with the last one of the memory the bytes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def read_at(fd: int, begin: int, end: int) -> bytes:
    """The bytes of a file from `begin` up to `end`; fewer where it ends before. Where a descriptor stands is
    shared by all processes that have it, so it is left alone."""
    pieces: list[bytes] = []
    while begin < end and (piece := os.pread(fd, end - begin, begin)):
        pieces.append(piece)
        begin += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _no_room(error: OSError) -> Unavailable:
    return Unavailable(
        f"the server has no room for more files at the moment ({error.strerror}); send this request again"
    )
