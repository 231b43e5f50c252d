"""Records in AIBrix's KV cache (`pip install aibrix-kvcache`), with its tiers and its connectors to
InfiniStore, PrisKV and others.

    --hicache-storage-backend aibrix
    --hicache-storage-backend-extra-config '{"environment": {"AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND": "PRIS"}}'

A record is one of AIBrix's blocks, of bytes, under the hash that is its key. AIBrix knows blocks by all
hashes up to theirs; a record's key depends on all tokens before it already, so each is asked for alone.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from runtime.storage.backend import BackendConfig
from runtime.storage.buffers import import_store
from runtime.storage.settings import AibrixSettings

BLOCK_TOKENS = 16  # of a block, in AIBrix's count; a record is one block
CACHES = 2  # keys and values, which a block has in AIBrix's count
MAX_TOKENS = 4096  # of a sequence, in AIBrix's count: it leaves room for them in every block


class CacheStatus(Protocol):
    """`aibrix_kvcache.Status`."""

    value: object

    def is_ok(self) -> bool:
        """Whether there is a value."""
        ...

    def is_not_found(self) -> bool:
        """Whether nothing was there."""
        ...


class Handle(Protocol):
    """Blocks that AIBrix owns."""

    def to_tensors(self) -> Sequence[Tensor]:
        """Their memory."""
        ...

    def release(self) -> None:
        """Gives them back."""
        ...


class Cache(Protocol):
    """The methods of `aibrix_kvcache.BaseKVCacheManager` that are used here; `prefix` is None."""

    def exists(self, prefix: None, query: object) -> CacheStatus:
        """-> number of tokens that are there"""
        ...

    def acquire(self, prefix: None, query: object) -> CacheStatus:
        """-> number of tokens, and a Handle"""
        ...

    def allocate_for(self, prefix: None, query: object) -> CacheStatus:
        """-> a Handle"""
        ...

    def put(self, prefix: None, query: object, kv_tensors: Handle) -> CacheStatus:
        """Stores the blocks of a handle, and takes it over."""
        ...

    def delete(self, prefix: None, query: object) -> CacheStatus:
        """Deletes blocks."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class AibrixBackend:
    """See Backend."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises StartError."""
        settings = msgspec.convert(config.settings, AibrixSettings)  # checked with the options
        os.environ.update(settings.environment)  # AIBrix reads no other configuration
        self._module = module = import_store("aibrix_kvcache", "aibrix")
        self._size = config.record_bytes
        self._prefix = config.identity.hex()
        width = -(-self._size // (BLOCK_TOKENS * CACHES))
        spec = module.KVCacheBlockSpec(
            block_ntokens=BLOCK_TOKENS,
            block_dtype=torch.uint8,
            block_layout=module.KVCacheBlockLayout.NCLD,
            tensor_spec=module.KVCacheTensorSpec(heads=[0], layers=[0], head_size=width),
        )
        self._cache: Cache = module.BaseKVCacheManager(
            module.KVCacheConfig(block_spec=spec, model_spec=module.ModelSpec(MAX_TOKENS))
        )

    def contains(self, keys: Sequence[bytes]) -> int:
        """See Backend.contains."""
        return next((at for at, key in enumerate(keys) if not self._is_there(key)), len(keys))

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """See Backend.read. Raises OSError where AIBrix fails."""
        status = self._cache.acquire(None, self._hashes(key))
        if not status.is_ok():
            if status.is_not_found():
                return False
            raise OSError(f"AIBrix could not read a record ({status})")
        found: tuple[int, Handle] = status.value  # type: ignore[assignment]
        num_tokens, handle = found
        try:
            if num_tokens < BLOCK_TOKENS:
                return False
            at, view = 0, memoryview(handle.to_tensors()[0].reshape(-1).numpy())
            for part in buffers:
                part[:] = view[at : at + part.nbytes]
                at += part.nbytes
        finally:
            handle.release()
        return True

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """See Backend.write. Raises OSError where AIBrix fails."""
        if self._is_there(key):
            return
        hashes = self._hashes(key)
        status = self._cache.allocate_for(None, hashes)
        if not status.is_ok():
            raise OSError(f"AIBrix has no room for a record ({status})")
        handle: Handle = status.value  # type: ignore[assignment]
        at, view = 0, memoryview(handle.to_tensors()[0].reshape(-1).numpy())
        for part in buffers:
            view[at : at + part.nbytes] = part
            at += part.nbytes
        status = self._cache.put(None, hashes, handle)
        if not status.is_ok():
            raise OSError(f"AIBrix could not store a record ({status})")

    def remove(self, key: bytes) -> None:
        """See Backend.remove."""
        self._cache.delete(None, self._hashes(key))

    def clear(self) -> int:
        """See Backend.clear. Raises OSError: AIBrix cannot list records."""
        raise OSError("AIBrix cannot list records; it evicts those that are not used")

    def stats(self) -> Mapping[str, float]:
        """See Backend.stats."""
        return {}

    def close(self) -> None:
        """See Backend.close."""
        self._cache.close()

    def _is_there(self, key: bytes) -> bool:
        status = self._cache.exists(None, self._hashes(key))
        return status.is_ok() and status.value == BLOCK_TOKENS

    def _hashes(self, key: bytes) -> object:
        return self._module.BlockHashes([self._prefix + key.hex()], BLOCK_TOKENS)
