"""What a storage backend is: a place for records of one size under keys of 16 bytes. This file is all that a
plug-in must know.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"module": "mypackage.pages:Bucket", "url": "..."}'

imports `mypackage.pages` and calls `Bucket(config)` with a BackendConfig, whose `settings` hold what else
stands in the JSON ({"url": "..."}). It has the methods of Backend. They are called in worker threads, several
at a time, and may take their time; what they raise is logged once, counted, and makes a miss.

A key is a digest of the model, its version and all tokens up to the page's end, so a record never changes and
may be shared by any number of servers. Records carry a checksum that is verified by whoever reads them: a
backend may lose or damage records, and tokens stay right.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct


class Damaged(Exception):
    """Raised by Backend.read: there is a record, but not the one that was written."""


class BackendConfig(Struct, frozen=True, kw_only=True):
    """What a backend is told when it opens."""

    record_bytes: int  # of every record
    identity: bytes  # 16 bytes: the same for servers that can use one another's records
    settings: dict[str, Any]  # what the user wrote, without what the tier itself reads


class Backend(Protocol):
    """A place for records. Buffers are parts of one record, in order; together they have `record_bytes`."""

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there, up to the first that is not."""
        ...

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """Fills the buffers. False: there is no such record, and the buffers hold anything. Raises
        Damaged."""
        ...

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """Keeps the record, unless it is there already. A reader sees all of it or nothing, or finds it
        damaged."""
        ...

    def remove(self, key: bytes) -> None:
        """Forgets a record that turned out to be damaged."""
        ...

    def clear(self) -> int:
        """Forgets all records of this identity. -> how many"""
        ...

    def stats(self) -> Mapping[str, float]:
        """Figures for the log and for metrics: `records`, `bytes`, `evicted` where they are known. Called on
        the event loop: be quick."""
        ...

    def close(self) -> None: ...
