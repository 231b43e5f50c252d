"""Checksums of pages on their way: against broken hardware and programs, not against people.

A CRC of every byte takes longer than the transfer itself. So 64-bit words are added up in blocks, which numpy
does at the speed of memory, and the sums go through a CRC-32: a damaged word changes its block's sum, a moved
block changes their order. Only damage whose words add up to zero within 4 KiB stays unseen.
"""

from zlib import crc32

import numpy as np

BLOCK_WORDS = 512
_BLOCK_BYTES = 8 * BLOCK_WORDS


class Checksum:
    """The checksum of bytes that come one after the other, however they are divided."""

    def __init__(self) -> None:
        self._value = 0
        self._rest = b""  # what is no whole block yet

    def add(self, view: memoryview) -> None:
        """Takes in the next bytes, which are contiguous in memory."""
        if self._rest:
            missing = _BLOCK_BYTES - len(self._rest)
            self._rest += view[:missing]
            if len(self._rest) < _BLOCK_BYTES:
                return
            self._add_blocks(memoryview(self._rest))
            view = view[missing:]
        whole = len(view) // _BLOCK_BYTES * _BLOCK_BYTES
        if whole:
            self._add_blocks(view[:whole])
        self._rest = bytes(view[whole:])

    @property
    def value(self) -> int:
        """The checksum of all bytes so far."""
        return crc32(self._rest, self._value)

    def _add_blocks(self, view: memoryview) -> None:
        words = np.frombuffer(view, np.uint64).reshape(-1, BLOCK_WORDS)
        self._value = crc32(words.sum(axis=1, dtype=np.uint64).data, self._value)
