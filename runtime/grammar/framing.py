"""Messages on a byte stream, each with its length before it."""

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("=I")


def framed(body: bytes) -> bytes:
    """The bytes of a message with its length."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream back into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with this data."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            yield bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
