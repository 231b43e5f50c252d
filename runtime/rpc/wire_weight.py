"""What an encoded message costs to decode, found without decoding it: sixteen megabytes may be one text or
millions of numbers.

Units are those of http/json_weight.py: a number weighs 1, a text 4, a message 5. The wire format is that of
protobuf: fields of a tag (number and type) and a value; texts, messages and packed numbers have a length.
"""

from collections.abc import Iterator

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from runtime.errors import InvalidRequest

NUMBER, TEXT, MESSAGE = 1, 4, 5
VARINT, LENGTH = 0, 2  # types on the wire
FIXED = {1: 8, 5: 4}  # bytes of numbers of these types
MAX_DEPTH = 8  # of messages in messages: more than runtime.proto has
WIDTHS = {FieldDescriptor.CPPTYPE_DOUBLE: 8, FieldDescriptor.CPPTYPE_FLOAT: 4}  # of packed numbers


def wire_weight(data: bytes, kind: Descriptor, most: int) -> int:
    """The weight of a message of this kind; it stops above `most`. Raises InvalidRequest for what is no
    protobuf, and for messages that are too deep."""
    weight, waiting = 0, [(0, len(data), kind, 0)]
    while waiting:
        at, end, kind, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequest("the message has messages within messages that runtime.proto does not have")
        for number, wire, first, last in _fields(data, at, end):
            field = kind.fields_by_number.get(number) if wire == LENGTH else None
            if wire != LENGTH:
                weight += NUMBER
            elif field is None:
                weight += TEXT
            elif field.message_type is None:
                weight += _weight_of(field, data, first, last)
            else:
                weight += MESSAGE
                waiting.append((first, last, field.message_type, depth + 1))
            if weight > most:
                return weight
    return weight


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message in data[at:end]: number, type on the wire, and where the value begins and ends.
    Raises InvalidRequest."""
    while at < end:
        tag, at = _varint(data, at, end)
        wire = tag & 7
        if wire == LENGTH:
            length, at = _varint(data, at, end)
            stop = at + length
            if stop > end:
                raise _malformed()
        else:
            stop = _end_of_number(data, at, end, wire)
        yield tag >> 3, wire, at, stop
        at = stop


def _weight_of(field: FieldDescriptor, data: bytes, at: int, end: int) -> int:
    """The weight of a field that is a text, or a line of packed numbers, in data[at:end]."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return TEXT
    if (width := WIDTHS.get(field.cpp_type)) is not None:
        return NUMBER * ((end - at) // width)
    # the last byte of each number has its highest bit clear
    return NUMBER * int(np.count_nonzero(np.frombuffer(data, np.uint8, end - at, at) < 0x80))


def _end_of_number(data: bytes, at: int, end: int, wire: int) -> int:
    if wire == VARINT:
        return _varint(data, at, end)[1]
    if wire not in FIXED or at + FIXED[wire] > end:  # proto3 has no other types
        raise _malformed()
    return at + FIXED[wire]


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises InvalidRequest."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise _malformed()


def _malformed() -> InvalidRequest:
    return InvalidRequest("the message is cut off, or no message of protobuf")
