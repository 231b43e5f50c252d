"""The interface of storage backends: records of one size under keys of 16 bytes. This file is all that a
plug-in must know.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"module": "mypackage.pages:Bucket", "url": "..."}'

imports `mypackage.pages` and calls `Bucket(config)` with a BackendConfig, whose `settings` hold the other
fields of the JSON ({"url": "..."}). The result has the methods of Backend. They are called in worker threads,
several at a time, and may block; an error is logged once, counted, and makes a miss.

For a model with recurrent layers it is called twice: for pages, and for the states behind them, which have
another size and another identity.

A key is a digest of the model, its version and all tokens up to the page's end, so a record never changes and
may be shared by any number of servers. Records carry a checksum that every reader verifies: a backend may
lose or damage records, and tokens stay right.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from runtime.json_value import JsonDict


class Damaged(Exception):
    """Raised by Backend.read: there is a record, but not the one that was written."""


class BackendConfig(Struct, frozen=True, kw_only=True):
    """What a backend needs to open."""

    record_bytes: int  # size of every record
    identity: bytes  # 16 bytes: the same for servers that can use one another's records
    settings: JsonDict  # fields of the JSON, without those that the tier itself reads


class Backend(Protocol):
    """Stores records. Buffers are parts of one record, in order; together they have `record_bytes`."""

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many records exist, from the first key on, up to the first one that does not."""
        ...

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """Fills the buffers. False: there is no such record, and the buffers' contents are undefined. Raises
        Damaged."""
        ...

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """Stores the record, unless it exists. A reader sees all of it or nothing, or finds it damaged."""
        ...

    def remove(self, key: bytes) -> None:
        """Deletes a damaged record."""
        ...

    def clear(self) -> int:
        """Deletes all records of this identity. -> how many"""
        ...

    def stats(self) -> Mapping[str, float]:
        """Statistics for the log and for metrics: `records`, `bytes`, `evicted` where they are known. Called
        on the event loop: must be quick."""
        ...

    def close(self) -> None:
        """Releases what the backend holds. No other method is called afterwards."""
        ...
