"""Checksums of pages on their way: against broken hardware and programs, not against people.

A CRC of every byte takes longer than the transfer itself. So 64-bit words are added up in blocks, which numpy
does at the speed of memory, and the sums go through a CRC-32: a damaged word changes its block's sum, a moved
block changes their order. Only damage whose words add up to zero within 4 KiB stays unseen.
"""

from collections.abc import Iterable
from zlib import crc32

import numpy as np

BLOCK_WORDS = 512
_BLOCK_BYTES = 8 * BLOCK_WORDS


def checksum(parts: Iterable[memoryview]) -> int:
    """Of the bytes of all parts, which are contiguous each. Bytes that are divided otherwise have another
    one."""
    value = 0
    for part in parts:
        whole = len(part) // _BLOCK_BYTES * _BLOCK_BYTES
        if whole:
            words = np.frombuffer(part[:whole], np.uint64).reshape(-1, BLOCK_WORDS)
            value = crc32(words.sum(axis=1, dtype=np.uint64).data, value)
        value = crc32(part[whole:], value)
    return value
