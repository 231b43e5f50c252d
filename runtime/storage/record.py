"""The record of a page: a header of 64 bytes, then the page's bytes of all ranks.

     0  magic "rtpage" and the version of this format (2 bytes)
     8  identity of the model and its settings, 16 bytes (identity.py)
    24  key, 16 bytes
    40  length of the page in bytes, 8
    48  CRC-32 of the page, 4
    52  8 zero bytes
    60  CRC-32 of the 60 bytes before, 4

A CRC-32 finds every error burst of up to 32 bits for certain, and any other damage but for one in four
thousand million. That is enough against disks, crashes and truncation; it is no defence against an attacker
who writes to the directory. It was chosen because zlib has it everywhere, it releases the GIL, and it is
faster than any digest of hashlib.
"""

import struct
from collections.abc import Sequence
from zlib import crc32

MAGIC = b"rtpage"
VERSION = 1
HEADER = struct.Struct("<6sH16s16sQI8x")
HEADER_BYTES = HEADER.size + 4


def checksum(parts: Sequence[memoryview]) -> int:
    """CRC-32 of all parts together."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value


def header(identity: bytes, key: bytes, parts: Sequence[memoryview]) -> bytearray:
    """The header of the page whose bytes are `parts`."""
    fields = HEADER.pack(MAGIC, VERSION, identity, key, sum(part.nbytes for part in parts), checksum(parts))
    return bytearray(fields + crc32(fields).to_bytes(4, "little"))


def is_intact(head: bytearray, identity: bytes, key: bytes, parts: Sequence[memoryview]) -> bool:
    """Whether `head` is, bit for bit, the header of `parts` under this identity and key."""
    return head == header(identity, key, parts)
