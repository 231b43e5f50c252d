"""Rows: the part of an answer that grows with its tokens, made while it is encoded."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from runtime.gil import give_way

T = TypeVar("T")
FEW = 64  # rows that exist at once as objects


class Rows(Generic[T]):
    """A list of `write(item)` for each of `items`, in JSON."""

    __slots__ = ("items", "write")
    __match_args__ = ("items", "write")

    def __init__(self, items: Sequence[T], write: Callable[[T], object]) -> None:
        self.items = items
        self.write = write

    def made(self) -> list[object]:
        """The list."""
        return [self.write(item) for item in self.items]


def made(value: object) -> object:
    """`value` with lists in place of its Rows."""
    if isinstance(value, Rows):
        return value.made()
    if isinstance(value, dict):
        return {key: made(part) for key, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict | Rows):
        return [made(part) for part in value]
    return value


def encode_rows(value: object) -> list[object]:
    """What the JSON encoder writes for Rows. Many rows become JSON one by one, so that no more than one row
    exists as objects. Raises NotImplementedError for other types."""
    if not isinstance(value, Rows):
        raise NotImplementedError(f"{type(value).__name__} has no JSON")
    if len(value.items) <= FEW:
        return value.made()
    return [_written(value.write(item)) for item in value.items]


def _written(row: object) -> msgspec.Raw:
    give_way()
    return msgspec.Raw(_encode(row))


_encode = msgspec.json.Encoder(enc_hook=encode_rows).encode
