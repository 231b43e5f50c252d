"""Attention over the pages of the key/value cache. A layer adds to the device's operators which cache is its
own, and how its scores are computed."""

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device, ForwardBatch, Ops, PackedLatent
from runtime.layers.attention.chunked import attend_chunks
from runtime.layers.attention.gathered import GatheredPlan
from runtime.layers.fused_ops import fused_ops_of, split_and_rotate
from runtime.models.config.mla_config import MlaConfig


class Attention:
    """Attention of layer `index` of the model, with `num_kv_heads` key/value heads on this rank."""

    def __init__(self, device: Device, index: int, num_kv_heads: int, head_dim: int, scores: Scores) -> None:
        self.ops = device.ops
        self.fused = fused_ops_of(device)
        self.index = index
        self.num_kv_heads = num_kv_heads
        self.key_dim = head_dim
        self.cache_dims: tuple[int, ...] = (head_dim, head_dim)  # of keys and of values in the cache
        self.scores = scores
        self.window = scores.window
        # KV cache group: layers with a sliding window use the last one, which may be the only one
        self.pool = -1 if scores.window else 0
        # scales of keys and values, where a checkpoint has them for an fp8 cache
        self.cache_scales: tuple[float, float] | None = None
        self.norms_rotated = False  # the norm comes behind the rotation
        self.chunk = 0  # tokens of a chunk that attention stays within (layers/attention/chunked.py); 0: none

    def prepare(
        self, qkv: Tensor, norm: tuple[Tensor, float] | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Output of the QKV projection, [T, (H + 2 K) * D] -> queries [T, H, D], as FusedOps.prepare_heads.
        Keys and values go to the cache. In a step whose prompts are shared `T` are the tokens of this rank's
        part, and the keys and values of all of them go there.

        With scales the cache holds k / k_scale and v / v_scale. Scores are linear in q and outputs are linear
        in v, so devices need not know of the scales.
        """
        (k_cache, v_cache), locations = batch.kv[self.index], batch.locations[self.pool]
        is_scaled = self.cache_scales is not None and k_cache.dtype.itemsize == 1
        if not is_scaled and not self.norms_rotated and batch.part is None:
            return self.fused.prepare_heads(qkv, norm, cos, sin, k_cache, v_cache, locations)
        first = None if self.norms_rotated else norm
        q, k, v = split_and_rotate(self.ops, qkv, k_cache, first, cos, sin)
        if self.norms_rotated and norm is not None:
            weights = norm[0].split((q.shape[1], k.shape[1]))
            q, k = (self.ops.rms_norm(x, weight, norm[1]) for x, weight in zip((q, k), weights, strict=True))
        if self.cache_scales is not None and is_scaled:
            k, v = k / self.cache_scales[0], v / self.cache_scales[1]
        if batch.part is not None:
            k, v = batch.part.all_tokens(torch.cat((k, v), 1)).chunk(2, 1)
        self.ops.store_kv(k, v, k_cache, v_cache, locations)
        return q

    def store(self, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Writes the step's keys and values [T, K, D] to the cache."""
        self.ops.store_kv(k, v, *batch.kv[self.index], batch.locations[self.pool])

    def forward(self, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Queries [T, H, D] over the keys and values in the cache, the step's own tokens included -> [T, H *
        D]."""
        begin_attention(batch, self.index)
        k_cache, _ = batch.kv[self.index]
        if self.cache_scales is None or k_cache.dtype.itemsize > 1:
            return self._attend(q, batch).flatten(1)
        k_scale, v_scale = self.cache_scales
        return self._attend(q * k_scale, batch).flatten(1) * v_scale

    def _attend(self, q: Tensor, batch: ForwardBatch) -> Tensor:
        caches, plan = batch.kv[self.index], batch.attention
        if self.chunk and isinstance(plan, GatheredPlan) and plan.longest > self.chunk:
            return attend_chunks(q, caches, plan.gathered, self.scores, self.chunk)
        return self.ops.attention(q, *caches, plan, self.scores)


class MlaAttention:
    """Multi-head latent attention over pages. The cache holds latents [T, 1, R] where Attention has keys, and
    the rotary keys that all heads share, [T, 1, P], where it has values."""

    num_kv_heads = 1
    window = 0
    pool = 0

    def __init__(self, ops: Ops, index: int, mla: MlaConfig, scale: float) -> None:
        self.ops = ops
        self.index = index
        self.cache_dims: tuple[int, ...] = (mla.kv_rank, mla.rope_dim)  # of what the cache holds
        self.scale = scale

    def cache_targets(self, batch: ForwardBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        """This layer's caches, and the locations in them where the step's tokens go."""
        return batch.kv[self.index], batch.locations[self.pool]

    def forward(self, q: Tensor, q_rope: Tensor, up: PackedLatent, batch: ForwardBatch) -> Tensor:
        """Queries [T, H, N] and their rotary parts [T, H, P] over the cache -> [T, H * V]. `up`: what
        Ops.pack_latent returned."""
        begin_attention(batch, self.index)
        return self.ops.latent_attention(
            q, q_rope, *batch.kv[self.index], up, batch.attention, self.scale
        ).flatten(1)


def begin_attention(batch: ForwardBatch, index: int) -> None:
    """Called where the attention of a layer with a cache begins, when the step's own tokens are in it: pages
    of this layer that come from host memory are waited for, and computed ones are saved."""
    if batch.page_loads is not None:
        batch.page_loads.wait(index)
    if batch.page_saves is not None:
        batch.page_saves.stored(index)
