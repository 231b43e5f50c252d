"""Records in LMCache (`pip install lmcache`), with its memory, its disks and its remote stores.

    --enable-lmcache                     LMCACHE_CONFIG_FILE=lmcache.yaml, as for other servers

LMCache's engine stores chunks of tokens, whose keys and values a connector copies from and to an accelerator.
Here the tokens of a chunk are the bytes of a record's key, and the connector copies the record, in host
memory. So LMCache keeps, moves and evicts pages as it does for others; those of other servers, whose layout
is another one, are not found.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig
from runtime.storage.buffers import import_store
from runtime.storage.settings import LmcacheSettings

CHUNK = 16  # tokens: a record's key has so many bytes
CACHES = 2  # keys and values, which a chunk has in LMCache's count
FILE = "LMCACHE_CONFIG_FILE"


class MemoryObject(Protocol):
    """LMCache's memory of a chunk."""

    tensor: Tensor | None


class Engine(Protocol):
    """The methods of `lmcache.v1.cache_engine.LMCacheEngine` that are used here. Other arguments go to the
    connector."""

    def post_init(self) -> None:
        """Opens its stores."""
        ...

    def lookup(self, tokens: list[int]) -> int:
        """-> number of tokens that are there, from the first one on"""
        ...

    def store(self, tokens: list[int], *, record: Sequence[memoryview]) -> None:
        """Stores a chunk."""
        ...

    def retrieve(self, tokens: list[int], *, record: Sequence[memoryview]) -> Tensor:
        """Reads a chunk. -> which tokens were read, bool [len(tokens)]"""
        ...

    def clear(self, tokens: list[int] | None = None) -> int:
        """Deletes chunks; None: all. -> how many"""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class RecordConnector:
    """Copies a record between the parts that a call names and LMCache's memory: its GPUConnectorInterface."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape

    def get_shape(self, num_tokens: int) -> torch.Size:
        """The shape of LMCache's memory for a chunk of `num_tokens` tokens."""
        assert num_tokens == CHUNK, num_tokens
        return self._shape

    def from_gpu(self, memory_obj: MemoryObject, start: int, end: int, **given: Sequence[memoryview]) -> None:
        """Copies a record to LMCache's memory."""
        at, view = 0, _bytes(memory_obj)
        for part in given["record"]:
            view[at : at + part.nbytes] = part
            at += part.nbytes

    def to_gpu(self, memory_obj: MemoryObject, start: int, end: int, **given: Sequence[memoryview]) -> None:
        """Copies a record from LMCache's memory."""
        at, view = 0, _bytes(memory_obj)
        for part in given["record"]:
            part[:] = view[at : at + part.nbytes]
            at += part.nbytes

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObject],
        starts: list[int],
        ends: list[int],
        **given: Sequence[memoryview],
    ) -> None:
        """`from_gpu` of several chunks."""
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory, start, end, **given)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObject],
        starts: list[int],
        ends: list[int],
        **given: Sequence[memoryview],
    ) -> None:
        """`to_gpu` of several chunks."""
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory, start, end, **given)


class LmcacheBackend:
    """See Backend."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises StartError."""
        settings = msgspec.convert(config.settings, LmcacheSettings)  # checked with the options
        engines = import_store("lmcache.v1.cache_engine", "lmcache")
        own = _configuration(settings.config_file or os.environ.get(FILE))
        name, width = f"runtime-{config.identity.hex()}", -(-config.record_bytes // (CHUNK * CACHES))
        metadata = import_store("lmcache.v1.metadata", "lmcache").LMCacheMetadata(
            model_name=name,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, CACHES, CHUNK, 1, width),
            chunk_size=CHUNK,
        )
        connector = RecordConnector(torch.Size((CACHES, 1, CHUNK, width)))
        self._name, self._builder = name, engines.LMCacheEngineBuilder
        self._engine: Engine = self._builder.get_or_create(name, own, metadata, connector, _alone, _alone)
        self._engine.post_init()

    def contains(self, keys: Sequence[bytes]) -> int:
        """See Backend.contains."""
        found = (self._engine.lookup(list(key)) for key in keys)
        return next((at for at, count in enumerate(found) if count < CHUNK), len(keys))

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """See Backend.read."""
        return bool(self._engine.retrieve(list(key), record=buffers).all())

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """See Backend.write."""
        if not self.contains([key]):
            self._engine.store(list(key), record=buffers)

    def remove(self, key: bytes) -> None:
        """See Backend.remove."""
        self._engine.clear(list(key))

    def clear(self) -> int:
        """See Backend.clear: all that LMCache has in this process, which is of one identity."""
        return self._engine.clear()

    def stats(self) -> Mapping[str, float]:
        """See Backend.stats."""
        return {}

    def close(self) -> None:
        """See Backend.close."""
        self._builder.destroy(self._name)


def _configuration(file: str | None) -> object:
    """LMCache's configuration of a file, or of the environment. Raises StartError."""
    module: ModuleType = import_store("lmcache.v1.config", "lmcache")
    if file is None:
        config = module.LMCacheEngineConfig.from_env()
    elif Path(file).is_file():
        config = module.LMCacheEngineConfig.from_file(file)
    else:
        raise StartError(f"--enable-lmcache: there is no file {file}; correct {FILE}, or leave it out")
    config.chunk_size = CHUNK
    config.use_layerwise = False  # a record is one piece
    return config


def _alone(value: object, source: int) -> object:
    """Broadcasts of a group of one rank."""
    return value


def _bytes(memory: MemoryObject) -> memoryview:
    assert memory.tensor is not None
    return memoryview(memory.tensor.reshape(-1).numpy())
