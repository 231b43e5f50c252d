"""Records in SiMM, the in-memory store of scitix/SiMM, through its Python client (`simm.kv`).

    --hicache-storage-backend simm
    --hicache-storage-backend-extra-config '{"manager_address": "10.0.0.1:30001"}'

The client is built with SiMM itself. Settings have SGLang's names.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig
from runtime.storage.buffers import import_store
from runtime.storage.settings import SimmSettings


class Store(Protocol):
    """The methods of `simm.kv.Store` that are used here. Errors are negative numbers."""

    def mexists(self, keys: list[str]) -> list[bool]:
        """-> whether each key is there"""
        ...

    def mput(self, keys: list[str], blocks: list[object]) -> list[int]:
        """Stores values. -> 0 for each"""
        ...

    def mget(self, keys: list[str], blocks: list[object]) -> list[int]:
        """Reads values. -> bytes of each"""
        ...

    def delete(self, key: str) -> int:
        """Deletes a value."""
        ...


class SimmBackend:
    """See Backend."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises StartError."""
        settings = msgspec.convert(config.settings, SimmSettings)  # checked with the options
        self._module = import_store("simm.kv", "simm")
        host, _, port = settings.manager_address.rpartition(":")
        flags = {
            "cm_primary_node_ip": host,
            "cm_primary_node_port": port,
            "clnt_thread_pool_size": str(settings.clnt_threadpool_size),
        }
        if settings.log_file is not None:
            flags["clnt_log_file"] = settings.log_file
        for name, value in flags.items():
            if not self._module.set_flag(name, value):
                raise StartError(f"--hicache-storage-backend simm: SiMM takes no {name} {value}; correct it")
        self._store: Store = self._module.Store()
        self._size = config.record_bytes
        self._prefix = f"runtime/{config.identity.hex()}/"
        self._own = threading.local()

    def contains(self, keys: Sequence[bytes]) -> int:
        """See Backend.contains."""
        found = self._store.mexists([self._name(key) for key in keys]) if keys else []
        return next((at for at, is_there in enumerate(found) if not is_there), len(found))

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """See Backend.read. Raises OSError where the store fails."""
        record, block = self._buffer()
        count = self._store.mget([self._name(key)], [block])[0]
        if count < 0:
            if not self.contains([key]):
                return False
            raise OSError(f"SiMM could not read a record (status {count})")
        if count != self._size:
            return False
        at, view = 0, memoryview(record.numpy())
        for part in buffers:
            part[:] = view[at : at + part.nbytes]
            at += part.nbytes
        return True

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """See Backend.write. Raises OSError where the store fails."""
        if self.contains([key]):
            return
        record, block = self._buffer()
        at, view = 0, memoryview(record.numpy())
        for part in buffers:
            view[at : at + part.nbytes] = part
            at += part.nbytes
        if status := self._store.mput([self._name(key)], [block])[0]:
            raise OSError(f"SiMM could not store a record (status {status})")

    def remove(self, key: bytes) -> None:
        """See Backend.remove."""
        self._store.delete(self._name(key))

    def clear(self) -> int:
        """See Backend.clear. Raises OSError: the client cannot list records."""
        raise OSError("SiMM's client cannot list records; it evicts those that are not used")

    def stats(self) -> Mapping[str, float]:
        """See Backend.stats: the store counts for all its clients together."""
        return {}

    def close(self) -> None:
        """See Backend.close: the client ends with its last reference."""
        del self._store

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _buffer(self) -> tuple[Tensor, object]:
        """This thread's memory for one record, uint8 [record_bytes], and SiMM's view of it. Raises
        OSError."""
        own: tuple[Tensor, object] | None = getattr(self._own, "buffer", None)
        if own is None:
            record = torch.empty(self._size, dtype=torch.uint8)
            if (registered := self._module.register_mr(record)) is None:
                raise OSError(f"SiMM could not register {self._size} bytes")
            own = record, self._module.BlockView.from_buffer(record.data_ptr(), self._size, registered)
            self._own.buffer = own
        return own
