"""Messages between this process and one that has a backend (process.py): each is one packet of a socket.

Setup ──► ◄── StoreReply, at the start
StoreCall ──► ◄── StoreReply
"""

from typing import Literal

from msgspec import Struct

from runtime.json_value import JsonDict

MAX_MESSAGE_BYTES = 160 << 10  # below the buffers of sockets that Linux has


class Setup(Struct, frozen=True, array_like=True):
    """What a backend begins with; see BackendConfig."""

    backend: str
    record_bytes: int
    identity: bytes
    settings: JsonDict


class StoreCall(Struct, frozen=True, array_like=True):
    """A method of Backend. A record that is written lies in the place of its socket in the memory that both
    processes map, and one that is read comes there."""

    method: Literal["contains", "read", "write", "remove", "clear"]
    keys: list[bytes]


class StoreReply(Struct, frozen=True, array_like=True):
    """What the method has returned, or why it failed."""

    value: int = 0
    error: str = ""
    is_damaged: bool = False  # the record was found damaged
