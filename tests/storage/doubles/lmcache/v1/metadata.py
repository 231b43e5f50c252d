"""A double of `lmcache.v1.metadata`."""

from dataclasses import dataclass

import torch


@dataclass
class LMCacheMetadata:
    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    use_mla: bool = False
    chunk_size: int = 256

    def get_shapes(self, num_tokens: int) -> list[torch.Size]:
        layers, caches, _, heads, width = self.kv_shape
        return [torch.Size((caches, layers, num_tokens, heads * width))]
