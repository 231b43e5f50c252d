"""Several arrays as one: what an encoder of transformers takes for a file (pixels, sizes, masks), on its way
to the ranks in MediaInput.values.

  4 bytes      length of the head
  head         msgpack: name, type and shape of each array
  the arrays, each at a multiple of 8 bytes
"""

from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec import Struct

ALIGN = 8  # bytes
LENGTH = np.dtype(np.uint32)


class ArrayHead(Struct, frozen=True, array_like=True):
    """What is known of an array before its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


_decoder = msgspec.msgpack.Decoder(list[ArrayHead])


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The arrays in a multiple of 8 bytes."""
    heads = [ArrayHead(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    head = msgspec.msgpack.encode(heads)
    parts = [np.array([len(head)], LENGTH).tobytes() + head, *(array.tobytes() for array in arrays.values())]
    return b"".join(part + bytes(-len(part) % ALIGN) for part in parts)


def unpack(values: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays in what `pack` gave, as an array of any type. They are views."""
    raw = values.view(np.uint8)
    size = int(raw[: LENGTH.itemsize].view(LENGTH)[0])
    begin = LENGTH.itemsize + size
    found = {}
    for head in _decoder.decode(raw[LENGTH.itemsize : begin].tobytes()):
        begin += -begin % ALIGN
        dtype = np.dtype(head.dtype)
        end = begin + dtype.itemsize * int(np.prod(head.shape, dtype=np.int64))
        found[head.name] = raw[begin:end].view(dtype).reshape(head.shape)
        begin = end
    return found
