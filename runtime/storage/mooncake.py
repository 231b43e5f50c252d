"""Records in Mooncake Store, which keeps them in the memory of its clients (kvcache-ai/Mooncake,
docs/source/python-api-reference/mooncake-store.md).

    --hicache-storage-backend mooncake
    --hicache-storage-backend-extra-config '{"master_server_address": "10.0.0.1:50051"}'

A record is written in one call, of as many parts as it has, and read into a buffer that is registered once
for each thread. The store evicts what was not used for long. Settings have the names that SGLang gives them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig
from runtime.storage.buffers import ThreadBuffers, import_store
from runtime.storage.settings import MooncakeSettings

PREFIX = "runtime"
NOT_FOUND = -704  # ErrorCode::OBJECT_NOT_FOUND of mooncake-store/include/types.h
FLAG = "--hicache-storage-backend mooncake"


class DistributedStore(Protocol):
    """The methods of `mooncake.store.MooncakeDistributedStore` that are used here. Results that are numbers
    are negative after an error."""

    def setup(
        self,
        hostname: str,
        metadata: str,
        segment: int,
        buffer: int,
        protocol: str,
        devices: str,
        master: str,
        /,
    ) -> int:
        """Connects to the master."""
        ...

    def put_parts(self, key: str, *parts: memoryview) -> int:
        """Stores an object that consists of parts, unless it is there."""
        ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Lets objects be read into this memory."""
        ...

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Reads an object. -> its bytes"""
        ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """-> 1 for each object that is there"""
        ...

    def remove(self, key: str, force: bool = False) -> int:
        """Deletes an object; `force`: also one that was just read."""
        ...

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """-> how many were deleted"""
        ...

    def close(self) -> int:
        """Leaves the store, with the memory that was lent to it."""
        ...


class MooncakeBackend:
    """See Backend."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises StartError."""
        settings = msgspec.convert(config.settings, MooncakeSettings)  # checked with the options
        self._size = config.record_bytes
        self._prefix = f"{PREFIX}/{config.identity.hex()}/"
        self._store = open_client(settings)
        self._buffers = ThreadBuffers(self._size, self._register)

    def contains(self, keys: Sequence[bytes]) -> int:
        """See Backend.contains."""
        found = self._store.batch_is_exist([self._name(key) for key in keys])
        return next((at for at, one in enumerate(found) if one != 1), len(found))

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """See Backend.read. Raises OSError where the store fails."""
        buffer = self._buffers.own()
        count = self._store.get_into(self._name(key), buffer.address, self._size)
        if count < 0:
            if count == NOT_FOUND:
                return False
            raise OSError(f"Mooncake could not read a record (status {count})")
        if count != self._size:
            return False
        buffer.scatter(buffers)
        return True

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """See Backend.write. Raises OSError where the store fails."""
        if status := self._store.put_parts(self._name(key), *buffers):
            raise OSError(f"Mooncake could not store a record (status {status})")

    def remove(self, key: bytes) -> None:
        """See Backend.remove."""
        self._store.remove(self._name(key), True)

    def clear(self) -> int:
        """See Backend.clear. Raises OSError where the store fails."""
        count = self._store.remove_by_regex(f"^{self._prefix}.*", True)
        if count < 0:
            raise OSError(f"Mooncake could not delete records (status {count})")
        return count

    def stats(self) -> Mapping[str, float]:
        """See Backend.stats: the store counts for all its clients together, and is not asked."""
        return {}

    def close(self) -> None:
        """See Backend.close."""
        self._store.close()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _register(self, address: int, size: int) -> None:
        """Raises OSError."""
        if status := self._store.register_buffer(address, size):
            raise OSError(f"Mooncake could not register {size} bytes (status {status})")


def open_client(settings: MooncakeSettings) -> DistributedStore:
    """A client that is connected. Raises StartError."""
    module = import_store("mooncake.store", "mooncake")
    store: DistributedStore = module.MooncakeDistributedStore()
    status = store.setup(
        settings.local_hostname,
        settings.metadata_server,
        settings.global_segment_size,
        settings.local_buffer_size,
        settings.protocol,
        settings.device_name,
        settings.master_server_address,
    )
    if status:
        raise StartError(
            f"{FLAG}: no store at {settings.master_server_address} (status {status}); start mooncake_master "
            'there, or correct "master_server_address" in --hicache-storage-backend-extra-config'
        )
    return store
