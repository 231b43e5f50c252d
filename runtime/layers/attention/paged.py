"""Attention over paged keys and values: what a layer adds to the device's arithmetic is which cache and
scores are its own."""

from typing import Any

from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Batch, Device, Ops
from runtime.layers.fused_ops import fused_of, turned_heads
from runtime.models.mla_config import Latent


class Attention:
    """Layer `index` of the model; `num_kv_heads` of this rank."""

    def __init__(self, device: Device, index: int, num_kv_heads: int, head_dim: int, scores: Scores) -> None:
        self.ops = device.ops
        self.fused = fused_of(device)
        self.index = index
        self.num_kv_heads = num_kv_heads
        self.key_dim = self.value_dim = head_dim  # of the cache
        self.scores = scores
        self.window = scores.window
        # layers with a window have the last one, which may be the only one
        self.pool = -1 if scores.window else 0
        # of keys and values, where a checkpoint has them for a cache of fp8
        self.cache_scales: tuple[float, float] | None = None

    def prepare(
        self, qkv: Tensor, norm: tuple[Tensor, float] | None, cos: Tensor, sin: Tensor, batch: Batch
    ) -> Tensor:
        """What a projection made, [T, (H + 2 K) * D] -> queries [T, H, D], as Fused.prepare_heads; keys and
        values go to the cache.

        With scales it has k / k_scale and v / v_scale: products are linear in q, and results in v, so devices
        need not know.
        """
        (k_cache, v_cache), locations = batch.kv[self.index], batch.locations[self.pool]
        if self.cache_scales is None or k_cache.dtype.itemsize > 1:
            return self.fused.prepare_heads(qkv, norm, cos, sin, k_cache, v_cache, locations)
        q, k, v = turned_heads(self.ops, qkv, k_cache, norm, cos, sin)
        self.ops.store_kv(k / self.cache_scales[0], v / self.cache_scales[1], k_cache, v_cache, locations)
        return q

    def forward(self, q: Tensor, batch: Batch) -> Tensor:
        """q [T, H, D] over what is in the cache, the step's own tokens among it -> [T, H * D]"""
        if batch.arrivals is not None:
            batch.arrivals.wait(self.index)
        k_cache, v_cache = batch.kv[self.index]
        if self.cache_scales is None or k_cache.dtype.itemsize > 1:
            return self.ops.attention(q, k_cache, v_cache, batch.attention, self.scores).flatten(1)
        k_scale, v_scale = self.cache_scales
        return (
            self.ops.attention(q * k_scale, k_cache, v_cache, batch.attention, self.scores).flatten(1)
            * v_scale
        )


class LatentAttention:
    """As Attention, where the cache holds latents [T, 1, R] for keys and what they share of rotary parts [T,
    1, P] for values."""

    num_kv_heads = 1
    window = 0
    pool = 0

    def __init__(self, ops: Ops, index: int, latent: Latent, scale: float) -> None:
        self.ops = ops
        self.index = index
        self.key_dim = latent.kv_rank
        self.value_dim = latent.rope_dim
        self.scale = scale

    def cache_targets(self, batch: Batch) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """This layer's caches, and where the step's tokens go in them."""
        return batch.kv[self.index], batch.locations[self.pool]

    def forward(self, q: Tensor, q_rope: Tensor, up: Any, batch: Batch) -> Tensor:
        """q [T, H, N] and q_rope [T, H, P] over what is in the cache -> [T, H * V]"""
        if batch.arrivals is not None:
            batch.arrivals.wait(self.index)
        return self.ops.latent_attention(
            q, q_rope, *batch.kv[self.index], up, batch.attention, self.scale
        ).flatten(1)
