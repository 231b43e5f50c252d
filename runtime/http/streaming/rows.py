"""Rows: the part of an answer that grows with its tokens, made while it is encoded."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

FEW = 64  # rows that exist at once as objects


class Rows:
    """A list of `write(item)` for each of `items`, in JSON."""

    __slots__ = ("items", "write")
    __match_args__ = ("items", "write")

    def __init__(self, items: Sequence[Any], write: Callable[[Any], Any]) -> None:
        self.items = items
        self.write = write

    def made(self) -> list[Any]:
        """The list."""
        return [self.write(item) for item in self.items]


def made(value: Any) -> Any:
    """`value` with lists in place of its Rows."""
    if isinstance(value, Rows):
        return value.made()
    if isinstance(value, dict):
        return {key: made(part) for key, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict | Rows):
        return [made(part) for part in value]
    return value


def encode_rows(value: Any) -> list[Any]:
    """What the JSON encoder writes for Rows. Many rows become JSON one by one, so that no more than one row
    exists as objects. Raises NotImplementedError for other types."""
    if not isinstance(value, Rows):
        raise NotImplementedError(f"{type(value).__name__} has no JSON")
    if len(value.items) <= FEW:
        return value.made()
    return [msgspec.Raw(_encode(row)) for row in map(value.write, value.items)]


_encode = msgspec.json.Encoder(enc_hook=encode_rows).encode
