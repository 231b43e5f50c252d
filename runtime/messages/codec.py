"""Messages as bytes: a msgpack header and the raw arrays behind it.

    ┌──────────────┬───────────────────┬─────┬─────────┬─────┬─────────┬─────┐
    │ uint32       │ header            │ pad │ array 0 │ pad │ array 1 │ ... │
    │ header bytes │ msgpack (msgspec) │     │         │     │         │     │
    └──────────────┴───────────────────┴─────┴─────────┴─────┴─────────┴─────┘

In the header an array is one integer, `elements * 16 + kind`, where `kind` is a row of KINDS. Arrays follow
in the order of their integers, each at a multiple of 8 bytes, so offsets need not be sent. Numbers have the
machine's byte order, since both ends are on one machine. Only one-dimensional arrays of the kinds in KINDS
can be sent.
"""

import struct
from types import UnionType
from typing import Generic, TypeVar

import msgspec
import numpy as np

from runtime.errors import RingError

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview

KINDS = tuple(
    np.dtype(name)
    for name in ("int32", "uint8", "float32", "uint32", "int64", "float64", "uint16", "float16", "int8")
)
"""What an array can hold; the position in this table is its kind on the wire."""

ALIGN = 8
_KIND_BITS = 4
_KIND_MASK = (1 << _KIND_BITS) - 1
_KIND_OF = {dtype: kind for kind, dtype in enumerate(KINDS)}
_ITEM_BYTES = tuple(dtype.itemsize for dtype in KINDS)
_EMPTY = tuple(np.empty(0, dtype) for dtype in KINDS)
_PAD = tuple(bytes(-n % ALIGN) for n in range(ALIGN))  # by length modulo ALIGN
_PREFIX = struct.Struct("=I")


class Wire(Generic[T]):
    """Encodes and decodes the messages of one union. Not thread-safe: each thread uses its own.

    `union` is a Struct type or a union of tagged ones, e.g. `Wire[ToRank](ToRank)`.
    """

    def __init__(self, union: type[T] | UnionType) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._refer)
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=self._resolve)
        # arrays and padding behind the header of the message that is being encoded
        self._parts: list[np.ndarray | bytes] = []
        self._body: Bytes = b""  # the message that is being decoded
        self._offset = 0  # where the next array of that message begins

    def encode(self, message: T) -> bytes:
        """The message as bytes. Raises RingError for an array that cannot be sent."""
        self._parts.clear()
        header = self._encoder.encode(message)
        prefix = _PREFIX.pack(len(header))
        padding = _PAD[(len(prefix) + len(header)) % ALIGN]
        # mypy does not know that arrays are buffers
        return b"".join((prefix, header, padding, *self._parts))  # type: ignore[arg-type]

    def encode_parts(self, message: T) -> list[Bytes]:
        """The parts of which `encode` makes one: those of arrays are views, nothing of them is copied. Raises
        RingError for an array that cannot be sent."""
        self._parts.clear()
        header = self._encoder.encode(message)
        prefix = _PREFIX.pack(len(header))
        begin = prefix + header + _PAD[(len(prefix) + len(header)) % ALIGN]
        return [
            begin,
            *(part if isinstance(part, bytes) else part.view(np.uint8).data for part in self._parts),
        ]

    def decode(self, body: Bytes) -> T:
        """The message in `body`. Its arrays are views of `body`: they keep it alive, and are writable if it
        is. Raises RingError for bytes that `encode` cannot have made.
        """
        if len(body) < _PREFIX.size:
            raise RingError(f"a message of {len(body)} bytes is too short to have a header")
        header_end = _PREFIX.size + _PREFIX.unpack_from(body)[0]
        if header_end > len(body):
            raise RingError(f"the header ends at byte {header_end} of a message of {len(body)} bytes")
        self._body, self._offset = body, _aligned(header_end)
        try:
            message: T = self._decoder.decode(memoryview(body)[_PREFIX.size : header_end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RingError(f"the header of a message is not valid: {error}") from error
        finally:
            self._body = b""
        if self._offset != len(body):
            raise RingError(f"the message has {len(body)} bytes, but its arrays end at byte {self._offset}")
        return message

    def _refer(self, array: object) -> int:
        """Encoder hook: appends an array to the message and returns the integer that stands for it."""
        if not isinstance(array, np.ndarray):
            raise RingError(f"a message cannot hold a {type(array).__name__}")
        kind = _KIND_OF.get(array.dtype)
        if kind is None or array.ndim != 1:
            raise RingError(
                f"a message cannot hold an array of {array.ndim} dimensions and type {array.dtype}"
            )
        if size := array.size:
            self._parts.append(np.ascontiguousarray(array))
            self._parts.append(_PAD[array.nbytes % ALIGN])
        return size << _KIND_BITS | kind

    def _resolve(self, expected: type, reference: object) -> np.ndarray:
        """Decoder hook: the array that an integer in the header stands for."""
        if expected is not np.ndarray or type(reference) is not int or reference < 0:
            raise RingError("the header of a message is not valid: there is no array where one must be")
        kind, size = reference & _KIND_MASK, reference >> _KIND_BITS
        if kind >= len(KINDS):
            raise RingError(f"the header of a message is not valid: arrays of kind {kind} do not exist")
        if size == 0:
            return _EMPTY[kind]
        begin = self._offset
        self._offset = end = _aligned(begin + size * _ITEM_BYTES[kind])
        if end > len(self._body):
            raise RingError(f"an array ends at byte {end} of a message of {len(self._body)} bytes")
        return np.frombuffer(self._body, KINDS[kind], size, begin)


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) & -ALIGN
