"""The bytes of a client's file, in memory without a name or in the file itself, for a process that decodes
them. They are never Python objects of the event loop: 256 MiB of video would be copied there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import InvalidRequest
from runtime.gil import give_way

PART_CHARS = 1 << 18  # written at a time


class Spool:
    """A file that is being collected; `param` names it in errors."""

    def __init__(self, param: str, max_bytes: int) -> None:
        self.param = param
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.fd = os.memfd_create("media", os.MFD_CLOEXEC)

    def write(self, part: bytes | memoryview) -> None:
        """Adds bytes. Raises InvalidRequest when there are too many."""
        self.check(self.num_bytes + len(part))
        view = memoryview(part)
        while view:
            view = view[os.write(self.fd, view) :]
        self.num_bytes += len(part)

    def check(self, num_bytes: int) -> None:
        """Raises InvalidRequest where so many bytes are too many."""
        if num_bytes > self.max_bytes:
            raise too_large(self.param, self.max_bytes)

    def close(self) -> None:
        """Gives the memory back."""
        os.close(self.fd)


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


def write_base64(out: Spool, text: str | memoryview, start: int) -> None:
    """Writes the base64 of `text` from `start` on as it is: the decoder reads it. Raises
    InvalidRequest, before anything is written, for a file of too many bytes. For a worker thread."""
    length = len(text) - start
    if length * 3 // 4 > out.max_bytes + 2:
        raise too_large(out.param, out.max_bytes)
    out.max_bytes = length
    try:
        for at in range(start, len(text), PART_CHARS):
            part = text[at : at + PART_CHARS]
            out.write(part.encode("ascii") if isinstance(part, str) else part)
            give_way()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{out.param} is not base64", param=out.param) from None
