"""DeepSeek V2 and V3 (and R1): latent attention, and experts in all but the first layers.

What is cached of a token is one latent vector and one rotary key part, from which all heads' keys and values
follow, so every rank keeps all of it. The families differ in data only: how experts are chosen (sparse.py),
whether queries come from a latent of their own (in V2-Lite they do not).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.devices.base import Batch, Device
from runtime.layers.attention.mla_prolog import PlainProlog, Prolog
from runtime.layers.attention.paged import LatentAttention
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.sequence_parallel import Parts
from runtime.layers.rotary import stretched_scale
from runtime.layers.weight import Layer, Share, even_share, scaled
from runtime.models.config import ModelConfig
from runtime.models.llama import Llama, sums_of

EPS = 1e-6  # of the norms inside attention, whatever config.json says of the others


class LatentSelfAttention(Layer):
    """Projections down to latents, norms, rotary positions, attention, and the way back up."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        assert config.latent is not None
        self.device = device
        self.joins = device.joins_latents
        self.parts = Parts(device.collectives)
        self.latent = latent = config.latent
        heads = even_share(config.num_heads, device.collectives, "attention heads")
        self.num_heads, query_dim = heads.size, latent.nope_dim + latent.rope_dim
        hidden, rank, queries = config.hidden_size, latent.kv_rank, scaled(heads, query_dim)
        q = queries if latent.q_rank is None else Share(latent.q_rank, 0, latent.q_rank)
        kv = Share(rank + latent.rope_dim, 0, rank + latent.rope_dim)
        self.qkv_a_proj: Linear | None = Linear(
            device, dtype, hidden, {"q": q, "kv": kv}, shard="column", bias=config.qkv_bias
        )
        self.q_a_layernorm = None if latent.q_rank is None else RMSNorm(device, dtype, latent.q_rank, EPS)
        self.q_b_proj: Linear | None = None
        if latent.q_rank is not None:
            self.q_b_proj = Linear(device, dtype, latent.q_rank, {"": queries}, shard="column")
        self.kv_a_layernorm = RMSNorm(device, dtype, rank, EPS)
        made = scaled(heads, latent.nope_dim + latent.value_dim)
        self.kv_b_proj: Linear | None = Linear(device, dtype, rank, {"": made}, shard="column")
        self.o_proj = Linear(
            device,
            dtype,
            config.num_heads * latent.value_dim,
            {"": hidden},
            shard="row",
            bias=config.o_bias,
            sums=sums_of(device),
        )
        self.up: Any = None  # made of it when it is complete
        self.prolog: Prolog | None = None  # and this of the others
        self.attention = LatentAttention(
            device.ops, index, latent, query_dim**-0.5 * stretched_scale(config.rope)
        )

    def finish(self) -> None:
        assert self.kv_b_proj is not None and self.qkv_a_proj is not None
        device, latent, heads = self.device, self.latent, self.num_heads
        self.up = device.ops.pack_latent(self.kv_b_proj.values().unflatten(0, (heads, -1)), latent.nope_dim)
        self.kv_b_proj = None
        plain = PlainProlog(
            device.ops, latent, heads, self.qkv_a_proj, self.q_a_layernorm, self.q_b_proj, self.kv_a_layernorm
        )
        self.prolog = plain if device.prologs is None else device.prologs.open(plain)
        if latent.is_paired != self.prolog.pairs_keys:
            for rows in self.qkv_a_proj.per_row():
                reorder(rows[-latent.rope_dim :].unsqueeze(0), self.prolog.pairs_keys)
        if latent.is_paired != self.prolog.pairs_queries:
            for rows in (self.q_b_proj or self.qkv_a_proj).per_row():
                queries = rows[: heads * (latent.nope_dim + latent.rope_dim)]
                reorder(queries.unflatten(0, (heads, -1))[:, latent.nope_dim :], self.prolog.pairs_queries)
        if self.prolog.finish():
            self.qkv_a_proj = self.q_b_proj = None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """-> queries and their rotary parts; latents and theirs go to the cache."""
        prolog, targets = self.prolog, self.attention.cache_targets(batch)
        assert prolog is not None, "a step before the weights are complete"
        join = partial(self.parts.join, num_tokens=len(batch.positions)) if self.joins else None
        if prolog.takes(batch.attention):
            return prolog.prepare(x if join is None else join(x), cos, sin, *targets, self.up)
        q, kv = prolog.project(x, join)
        q, q_rope = q.split((self.latent.nope_dim, self.latent.rope_dim), dim=2)
        q_rope = prolog.turn(q_rope, cos, sin)
        prolog.store(kv, cos, sin, *targets)
        return q, q_rope

    def attend(self, queries: tuple[Tensor, ...], batch: Batch) -> Tensor:
        return self.attention.forward(*queries, self.up, batch)


def reorder(rows: Tensor, to_pairs: bool) -> None:
    """Brings, in place, the second of each pair of neighbours of dimension 1 behind all the first ones, or
    back. Scores do not change, as queries and keys are turned alike."""
    halves, twos = (rows.unflatten(1, shape).transpose(1, 2).flatten(1, 2) for shape in ((-1, 2), (2, -1)))
    rows.copy_(twos if to_pairs else halves)


class DeepSeek(Llama):
    """Llama's frame around other attention."""

    fused = {
        "q_proj": ("qkv_a_proj", "q"),
        "q_a_proj": ("qkv_a_proj", "q"),
        "kv_a_proj_with_mqa": ("qkv_a_proj", "kv"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }
    attention_layer = LatentSelfAttention
