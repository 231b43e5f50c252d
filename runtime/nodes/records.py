"""Messages as authenticated records in a stream of bytes.

    ┌────────────────┬──────┬─────────┬────────────────────────────────────────────┐
    │ uint32         │ kind │ payload │ HMAC-SHA256, cut to 16 bytes, over number, │
    │ payload bytes  │      │         │ header and payload                         │
    └────────────────┴──────┴─────────┴────────────────────────────────────────────┘

Records are counted in each direction, and the number is authenticated without being sent: a record that is
repeated, left out, changed or sent back to its sender is noticed. Longer messages travel in several records,
all but the last of kind MORE, so at most MAX_RECORD_BYTES are kept of what is not authenticated yet.

The stream is not encrypted: what ranks send each other, activations of the same requests, travels in the
clear on the same network, and no library of collectives encrypts it.
"""

import hmac
import struct

from runtime.errors import LinkError

MAX_RECORD_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 30  # as in a ring
LAST, MORE = 0, 1  # kinds of records
TAG_BYTES = 16
_HEADER = struct.Struct(">IB")
_NUMBER = struct.Struct(">Q")


class Sealer:
    """Makes the records of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, message: bytes) -> bytes:
        """The records of a message. Raises LinkError for one above MAX_MESSAGE_BYTES."""
        if len(message) <= MAX_RECORD_BYTES:
            return self._record(message, LAST)
        if len(message) > MAX_MESSAGE_BYTES:
            raise LinkError(f"a message of {len(message)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        parts = [message[at : at + MAX_RECORD_BYTES] for at in range(0, len(message), MAX_RECORD_BYTES)]
        return b"".join([*(self._record(part, MORE) for part in parts[:-1]), self._record(parts[-1], LAST)])

    def _record(self, payload: bytes, kind: int) -> bytes:
        record = _HEADER.pack(len(payload), kind) + payload
        tag = _tag(self._key, self._number, record)
        self._number += 1
        return record + tag


class Opener:
    """Reads the records of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._begun = bytearray()  # the records so far of a long message

    def open(self, buffer: bytearray) -> list[bytes]:
        """Takes all whole records from the beginning of `buffer`. -> the messages that they complete. Raises
        LinkError for what the other side cannot have sent; the stream cannot be read any further then."""
        messages, at = [], 0
        while len(buffer) - at >= _HEADER.size:
            size, kind = _HEADER.unpack_from(buffer, at)
            if size > MAX_RECORD_BYTES or kind not in (LAST, MORE):
                raise LinkError(f"a record of kind {kind} and {size} bytes is none of this protocol")
            end = at + _HEADER.size + size
            if len(buffer) < end + TAG_BYTES:
                break
            record = bytes(buffer[at:end])
            if not hmac.compare_digest(
                bytes(buffer[end : end + TAG_BYTES]), _tag(self._key, self._number, record)
            ):
                raise LinkError(f"record {self._number} is not authentic")
            self._number += 1
            at = end + TAG_BYTES
            if (message := self._add(record[_HEADER.size :], kind)) is not None:
                messages.append(message)
        del buffer[:at]
        return messages

    def _add(self, payload: bytes, kind: int) -> bytes | None:
        """-> the message, when this was its last record"""
        if kind == LAST and not self._begun:
            return payload
        if len(self._begun) + len(payload) > MAX_MESSAGE_BYTES:
            raise LinkError(f"a message has more than {MAX_MESSAGE_BYTES} bytes")
        self._begun += payload
        if kind == MORE:
            return None
        message, self._begun = bytes(self._begun), bytearray()
        return message


def _tag(key: bytes, number: int, record: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + record, "sha256")[:TAG_BYTES]
