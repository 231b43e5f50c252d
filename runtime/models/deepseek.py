"""DeepSeek V2 and V3 (and R1): multi-head latent attention (MLA), and experts in all but the first layers.

The cache holds one latent vector and one rotary key for each token, from which the keys and values of all
heads follow, so every rank caches all of it. The families differ in data only: how experts are selected
(moe_config.py), and whether queries come from a latent of their own (in V2-Lite they do not).
"""

from functools import partial

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch, PackedLatent
from runtime.layers.attention.mla_prolog import PlainProlog, Prolog
from runtime.layers.attention.paged import MlaAttention
from runtime.layers.linear import Linear, ReorderedLinear
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.context_parallel import own_tokens
from runtime.layers.parallel.sequence_parallel import SequenceParallel
from runtime.layers.rotary import mla_score_scale, position_scales
from runtime.layers.weight import Layer, PackedModules, replicated_shard, scaled_shard, unit_shard
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama
from runtime.models.self_attention import attention_reduction

EPS = 1e-6  # of the norms inside attention; rms_norm_eps of config.json is that of the other norms


class MlaSelfAttention(Layer):
    """Projections to latents, norms, rotary positions, attention, and the projection from latents to
    outputs."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        assert config.mla is not None
        self.device = device
        self.gathers_tokens = device.gathers_after_q
        self.sequence_parallel = SequenceParallel(device.group_ranks)
        self.mla = mla = config.mla
        heads = unit_shard(config.num_heads, device.head_ranks, "attention heads")
        self.num_heads, query_dim = heads.size, mla.nope_dim + mla.rope_dim
        hidden, rank, queries = config.hidden_size, mla.kv_rank, scaled_shard(heads, query_dim)
        q = queries if mla.q_rank is None else replicated_shard(mla.q_rank)
        kv = replicated_shard(rank + mla.rope_dim)
        self.qkv_a_proj: Linear | None = ReorderedLinear(
            device, dtype, hidden, {"q": q, "kv": kv}, bias=config.qkv_bias
        )
        self.q_a_layernorm = None if mla.q_rank is None else RMSNorm(device, dtype, mla.q_rank, EPS)
        self.q_b_proj: Linear | None = None
        if mla.q_rank is not None:
            self.q_b_proj = ReorderedLinear(device, dtype, mla.q_rank, {"": queries}, ranks=device.head_ranks)
        self.kv_a_layernorm = RMSNorm(device, dtype, rank, EPS)
        up_outputs = scaled_shard(heads, mla.nope_dim + mla.value_dim)
        self.kv_b_proj: Linear | None = Linear(
            device, dtype, rank, {"": up_outputs}, shard="column", ranks=device.head_ranks
        )
        self.o_proj = Linear(
            device,
            dtype,
            scaled_shard(heads, mla.value_dim),
            {"": hidden},
            shard="row",
            bias=config.o_bias,
            reduction=attention_reduction(device),
            ranks=device.head_ranks,
        )
        self.position_scale = config.position_scale_of(index)
        self.up: PackedLatent | None = None  # what Ops.pack_latent makes of kv_b_proj
        self.prolog: Prolog | None = None  # made of the other projections when they are loaded
        self.attention = MlaAttention(device.ops, index, mla, query_dim**-0.5 * mla_score_scale(config.rope))

    def finish_loading(self) -> None:
        """Packs kv_b_proj, makes the prolog, and brings the rotary rows of the weights into the order that it
        wants."""
        assert self.kv_b_proj is not None and self.qkv_a_proj is not None
        device, mla, heads = self.device, self.mla, self.num_heads
        self.up = device.ops.pack_latent(self.kv_b_proj.full_weight().unflatten(0, (heads, -1)), mla.nope_dim)
        self.kv_b_proj = None
        plain = PlainProlog(
            device.ops, mla, heads, self.qkv_a_proj, self.q_a_layernorm, self.q_b_proj, self.kv_a_layernorm
        )
        self.prolog = plain if device.mla_prologs is None else device.mla_prologs.open(plain)
        self.reorder_rotary_rows(queries=self.prolog.interleaves_queries, keys=self.prolog.interleaves_keys)
        if self.prolog.take_weights():
            self.qkv_a_proj = self.q_b_proj = None

    @property
    def reads_once(self) -> bool:
        """Whether only `qkv_a_proj` reads what `project` is given, where it is used at all."""
        return type(self).project is MlaSelfAttention.project

    def reorder_rotary_rows(self, *, queries: bool, keys: bool) -> None:
        """Brings the rotary rows of queries and keys into an order: True: rows 2i and 2i + 1 rotate together;
        False: rows i and i + P / 2."""
        assert self.qkv_a_proj is not None
        mla, heads = self.mla, self.num_heads
        if mla.is_interleaved != keys:
            for rows in self.qkv_a_proj.row_tensors():
                reorder(rows[-mla.rope_dim :].unsqueeze(0), keys)
        if mla.is_interleaved != queries:
            for rows in (self.q_b_proj or self.qkv_a_proj).row_tensors():
                of_heads = rows[: heads * (mla.nope_dim + mla.rope_dim)].unflatten(0, (heads, -1))
                reorder(of_heads[:, mla.nope_dim :], queries)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x -> queries [T, H, N] and their rotary parts [T, H, P]; latents and rotary keys go to the
        cache."""
        queries = self._queries(x, cos, sin, batch)
        if self.position_scale is None:
            return queries
        scales = position_scales(self.position_scale, own_tokens(batch.part, batch.positions))
        return tuple(part * scales.to(part.dtype) for part in queries)

    def _queries(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """As `project`, without scales of positions."""
        prolog, targets = self.prolog, self.attention.cache_targets(batch)
        assert prolog is not None, "a step before the weights are complete"
        gather = (
            partial(self.sequence_parallel.all_gather, num_tokens=len(batch.positions))
            if self.gathers_tokens
            else None
        )
        if batch.part is None and prolog.takes(batch.attention):
            return prolog.prepare(x if gather is None else gather(x), cos, sin, *targets, self.up)
        q, kv = prolog.project(x, gather)
        q, q_rope = q.split((self.mla.nope_dim, self.mla.rope_dim), dim=2)
        q_rope = prolog.rotate(q_rope, cos, sin)
        if batch.part is None:
            prolog.store(kv, cos, sin, *targets)
            return q, q_rope
        assert isinstance(prolog, PlainProlog), "refused with a device's own prologs"
        mine = torch.cat(prolog.keys(kv, cos, sin), 2)
        entries = batch.part.all_tokens(mine).split((self.mla.kv_rank, self.mla.rope_dim), 2)
        self.device.ops.store_kv(*entries, *targets[0], targets[1])
        return q, q_rope

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * V], before `o_proj`."""
        return self.attention.forward(*queries, self.up, batch)


def reorder(rows: Tensor, to_pairs: bool) -> None:
    """Reorders dimension 1 of rows [n, P, ...] in place: from rows 2i and 2i + 1 that rotate together to rows
    i and i + P / 2, or with `to_pairs` back. Scores do not change, as queries and keys are rotated alike."""
    halves, twos = (rows.unflatten(1, shape).transpose(1, 2).flatten(1, 2) for shape in ((-1, 2), (2, -1)))
    rows.copy_(twos if to_pairs else halves)


class DeepSeek(Llama):
    """Llama with MLA. See GenerativeModel."""

    packed_modules: PackedModules = {
        "q_proj": ("qkv_a_proj", "q"),
        "q_a_proj": ("qkv_a_proj", "q"),
        "kv_a_proj_with_mqa": ("qkv_a_proj", "kv"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }
    attention_class = MlaSelfAttention
