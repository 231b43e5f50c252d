"""A double of `lmcache.v1.cache_engine`: chunks of tokens in memory, moved by the connector that it is given.
Engines of one model name share their chunks, as with a remote store."""

from typing import Any

import torch

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

STORES: dict[str, dict[tuple[int, ...], "MemoryObj"]] = {}


class MemoryObj:
    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.tensor: torch.Tensor | None = torch.zeros(shape, dtype=dtype)


class LMCacheEngine:
    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, connector: Any) -> None:
        assert config.chunk_size == metadata.chunk_size == metadata.kv_shape[2] and not config.use_layerwise
        self.metadata, self.connector, self.config = metadata, connector, config
        self.chunks: dict[tuple[int, ...], MemoryObj] = {}
        self.post_inited = False

    def post_init(self) -> None:
        self.chunks = STORES.setdefault(self.metadata.model_name, {})
        self.post_inited = True

    def lookup(self, tokens: list[int]) -> int:
        assert self.post_inited
        return len(tokens) if tuple(tokens) in self.chunks else 0

    def store(self, tokens: list[int], **kwargs: Any) -> None:
        assert len(tokens) == self.config.chunk_size
        memory = MemoryObj(self.metadata.get_shapes(len(tokens))[0], self.metadata.kv_dtype)
        self.connector.batched_from_gpu([memory], [0], [len(tokens)], **kwargs)
        self.chunks[tuple(tokens)] = memory

    def retrieve(self, tokens: list[int], **kwargs: Any) -> torch.Tensor:
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        if (memory := self.chunks.get(tuple(tokens))) is not None:
            self.connector.batched_to_gpu([memory], [0], [len(tokens)], **kwargs)
            mask[:] = True
        return mask

    def clear(self, tokens: list[int] | None = None) -> int:
        keys = list(self.chunks) if tokens is None else [tuple(tokens)]
        return sum(self.chunks.pop(key, None) is not None for key in keys)

    def close(self) -> None:
        self.post_inited = False


class LMCacheEngineBuilder:
    engines: dict[str, LMCacheEngine] = {}

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        gpu_connector: Any,
        broadcast_fn: Any,
        broadcast_object_fn: Any,
    ) -> LMCacheEngine:
        if instance_id not in cls.engines:
            cls.engines[instance_id] = LMCacheEngine(config, metadata, gpu_connector)
        return cls.engines[instance_id]

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        if (engine := cls.engines.pop(instance_id, None)) is not None:
            engine.close()
