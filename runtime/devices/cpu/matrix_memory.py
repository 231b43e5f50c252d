"""Memory for packed matrices, in huge pages of this process where the system has them.

A step reads every weight once, and in pages of 4 KB that takes a sixth more time. A matrix by itself has few
huge pages, because these begin at multiples of 2 MB, and one of less than 2 MB has none: so matrices follow
each other in mappings of many.
"""

import mmap

import numpy as np
import torch
from torch import Tensor

from runtime.huge_pages import prefer_huge_pages

HUGE_PAGE = 2 << 20
MAPPING_BYTES = 64 << 20  # physical memory is taken as matrices are written
ALIGNMENT = 64  # of a matrix: a line of the cache


class MatrixMemory:
    """Mappings from which matrices take their memory. One is returned to the system when the last of its
    matrices is gone. Used by one thread at a time."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None  # the latest
        self._next = 0  # offset of its free part

    def take(self, num_bytes: int) -> Tensor:
        """Memory of a matrix, uint8 [num_bytes], at least 1 byte. Raises OSError where there is none."""
        if self._mapping is None or self._next + num_bytes > len(self._mapping):
            self._map(max(num_bytes, MAPPING_BYTES))
        assert self._mapping is not None
        begin = self._next
        self._next += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(self._mapping, dtype=torch.uint8, offset=begin, count=num_bytes)

    def _map(self, num_bytes: int) -> None:
        """A mapping with so many bytes from a huge page's beginning on."""
        self._mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self._next = -address % HUGE_PAGE
        prefer_huge_pages(address + self._next, num_bytes)
