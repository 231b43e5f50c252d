"""The bytes of a client's file, in memory without a name or in the file itself, for a process that decodes
them. They are never Python objects of the event loop: 256 MiB of video would be copied there."""

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import InvalidRequest
from runtime.gil import give_way
from runtime.memory_file import MemoryFile

PART_CHARS = 1 << 18  # written at a time


class Spool:
    """A file that is being collected; `param` names it in errors."""

    def __init__(self, param: str, max_bytes: int) -> None:
        self.param = param
        self.max_bytes = max_bytes
        self._memory = MemoryFile()

    @property
    def fd(self) -> int:
        """Descriptor of the bytes."""
        return self._memory.fd

    @property
    def num_bytes(self) -> int:
        """Bytes that were written."""
        return self._memory.num_bytes

    def write(self, part: bytes) -> None:
        """Adds bytes. Raises InvalidRequest when there are too many; Unavailable."""
        self.check(self.num_bytes + len(part))
        self._memory.append(part)

    def check(self, num_bytes: int) -> None:
        """Raises InvalidRequest where so many bytes are too many."""
        if num_bytes > self.max_bytes:
            raise too_large(self.param, self.max_bytes)

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()


@contextmanager
def spool(param: str, max_bytes: int) -> Iterator[Spool]:
    """A spool that is closed at the end."""
    one = Spool(param, max_bytes)
    try:
        yield one
    finally:
        one.close()


def too_large(param: str, max_bytes: int) -> InvalidRequest:
    """The error for a file of too many bytes."""
    return InvalidRequest(
        f"{param}: the file has more than {max_bytes} bytes; send a smaller one", param=param
    )


def check_base64(num_chars: int, param: str, max_bytes: int) -> None:
    """Raises InvalidRequest where base64 of so many characters is a file of too many bytes."""
    if num_chars * 3 // 4 > max_bytes + 2:
        raise too_large(param, max_bytes)


def write_base64(out: Spool, text: str, start: int) -> None:
    """Writes the base64 of `text` from `start` on as it is: the decoder reads it. Raises
    InvalidRequest, before anything is written, for a file of too many bytes. For a worker thread."""
    length = len(text) - start
    check_base64(length, out.param, out.max_bytes)
    out.max_bytes = length
    try:
        for at in range(start, len(text), PART_CHARS):
            out.write(text[at : at + PART_CHARS].encode("ascii"))
            give_way()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{out.param} is not base64", param=out.param) from None
