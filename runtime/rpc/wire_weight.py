"""What an encoded message costs to decode, found without decoding it: sixteen megabytes may be one text or
millions of numbers.

Units are those of http/json_weight.py: a number weighs 1, a text 4, a message 5. The wire format is that of
protobuf: fields of a tag (number and type) and a value; texts, messages and packed numbers have a length.
"""

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
        while at < end:
            tag, at = _varint(data, at, end)
            wire = tag & 7
            if wire == LENGTH:
                length, at = _varint(data, at, end)
                if length > end - at:
                    raise _malformed()
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    waiting.append((at, at + length, field.message_type, depth + 1))
                    weight += MESSAGE
                else:
                    weight += TEXT if field is None else _weight_of(field, data, at, at + length)
                at += length
            else:
                weight += NUMBER
                at = _end_of_number(data, at, end, wire)
            if weight > most:
                return weight
    return weight


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
