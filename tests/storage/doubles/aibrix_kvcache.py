"""A double of AIBrix's KV cache (python/aibrix_kvcache of vllm-project/aibrix): blocks under their hashes, in
tensors that it owns. One store for all, as its remote connectors have it."""

import os
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

BLOCKS: dict[tuple[str, ...], torch.Tensor] = {}
FAILING: list[str] = []  # error codes of the next calls that store or read
HELD: set[int] = set()  # handles that were not given back


class KVCacheBlockLayout(Enum):
    NCLD = auto()
    LCND = auto()


@dataclass
class KVCacheTensorSpec:
    heads: list[int]
    layers: list[int]
    head_size: int


@dataclass
class KVCacheBlockSpec:
    block_ntokens: int
    block_dtype: torch.dtype
    block_layout: KVCacheBlockLayout
    tensor_spec: KVCacheTensorSpec


@dataclass
class ModelSpec:
    max_model_len: int


@dataclass
class KVCacheConfig:
    block_spec: KVCacheBlockSpec
    model_spec: ModelSpec


class Status:
    def __init__(self, code: str, value: Any = None) -> None:
        self.error_code, self.value = code, value

    def is_ok(self) -> bool:
        return self.error_code == "OK"

    def is_not_found(self) -> bool:
        return self.error_code == "NOT_FOUND"


class BlockHashes:
    def __init__(self, data: list[str], block_ntokens: int) -> None:
        assert isinstance(data, list) and all(isinstance(one, str) for one in data)
        self.hashes, self.block_ntokens = tuple(data), block_ntokens


class Handle:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        HELD.add(id(self))

    def to_tensors(self) -> list[torch.Tensor]:
        return [self.tensor]

    def release(self) -> None:
        HELD.remove(id(self))


class BaseKVCacheManager:
    def __init__(self, config: KVCacheConfig) -> None:
        spec, tensors = config.block_spec, config.block_spec.tensor_spec
        assert spec.block_layout is KVCacheBlockLayout.NCLD
        self.tokens = spec.block_ntokens
        self.shape = (self.tokens, 2, len(tensors.layers), len(tensors.heads), tensors.head_size)
        self.dtype = spec.block_dtype
        self.backend = os.environ.get("AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND", "")

    def exists(self, prefix: None, query: BlockHashes) -> Status:
        assert query.block_ntokens == self.tokens
        return Status("OK", self.tokens) if query.hashes in BLOCKS else Status("NOT_FOUND")

    def acquire(self, prefix: None, query: BlockHashes) -> Status:
        if FAILING:
            return Status(FAILING.pop())
        if query.hashes not in BLOCKS:
            return Status("NOT_FOUND")
        return Status("OK", (self.tokens, Handle(BLOCKS[query.hashes].clone())))

    def allocate_for(self, prefix: None, query: BlockHashes) -> Status:
        if FAILING:
            return Status(FAILING.pop())
        return Status("OK", Handle(torch.empty(self.shape, dtype=self.dtype)))

    def put(self, prefix: None, query: BlockHashes, kv_tensors: Handle) -> Status:
        BLOCKS[query.hashes] = kv_tensors.to_tensors()[0]
        kv_tensors.release()  # as the cache has taken it over
        return Status("OK", self.tokens)

    def delete(self, prefix: None, query: BlockHashes) -> Status:
        BLOCKS.pop(query.hashes, None)
        return Status("OK")

    def close(self) -> None:
        pass
