"""Attention over paged keys and values: what a layer adds to the device's arithmetic is which cache and window are its own."""

from typing import Any

from torch import Tensor

from runtime.devices.base import Batch, Ops
from runtime.models.latent import Latent


class Attention:
    """Layer `index` of the model; `num_kv_heads` of this rank; `window` 0 sees the whole past."""

    def __init__(self, ops: Ops, index: int, num_kv_heads: int, head_dim: int, window: int) -> None:
        self.ops = ops
        self.index = index
        self.num_kv_heads = num_kv_heads
        self.key_dim = self.value_dim = head_dim  # of the cache
        self.window = window
        self.pool = -1 if window else 0  # layers with a window have the last one, which may be the only one
        self.scales: tuple[float, float] | None = None  # of keys and values, where a checkpoint has them for a cache of fp8

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H * D]; writes k and v to the cache first."""
        if batch.arrivals is not None:
            batch.arrivals.wait(self.index)
        k_cache, v_cache = batch.kv[self.index]
        if self.scales is not None and k_cache.dtype.itemsize == 1:
            return self._scaled(q, k, v, batch, *self.scales)
        self.ops.store_kv(k, v, k_cache, v_cache, batch.locations[self.pool])
        return self.ops.attention(q, k_cache, v_cache, batch.attention, self.window).flatten(1)

    def _scaled(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, k_scale: float, v_scale: float) -> Tensor:
        """The cache has k / k_scale and v / v_scale. Scores are linear in q, and results in v, so devices need not know."""
        k_cache, v_cache = batch.kv[self.index]
        self.ops.store_kv(k / k_scale, v / v_scale, k_cache, v_cache, batch.locations[self.pool])
        return self.ops.attention(q * k_scale, k_cache, v_cache, batch.attention, self.window).flatten(1) * v_scale


class LatentAttention:
    """As Attention, where the cache holds latents [T, 1, R] for keys and what they share of rotary parts [T, 1, P] for values."""

    num_kv_heads = 1
    window = 0
    pool = 0

    def __init__(self, ops: Ops, index: int, latent: Latent, scale: float) -> None:
        self.ops = ops
        self.index = index
        self.key_dim = latent.kv_rank
        self.value_dim = latent.rope_dim
        self.scale = scale

    def forward(self, q: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor, up: Any, batch: Batch) -> Tensor:
        """q [T, H, N], q_rope [T, H, P], latents [T, 1, R], ropes [T, 1, P] -> [T, H * V]; writes the last two to the cache first."""
        if batch.arrivals is not None:
            batch.arrivals.wait(self.index)
        caches = batch.kv[self.index]
        self.ops.store_kv(latents, ropes, *caches, batch.locations[self.pool])
        return self.ops.latent_attention(q, q_rope, *caches, up, batch.attention, self.scale).flatten(1)
