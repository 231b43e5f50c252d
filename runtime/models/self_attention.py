"""Grouped-query attention of a decoder layer, with what the families' configurations change about it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.attention.paged import Attention
from runtime.layers.attention.query_key_norms import HeadLayerNorms, ProjectionNorms, ShardedNormWeight
from runtime.layers.linear import Linear, QkvLinear, Reduction
from runtime.layers.norm import RMSNorm, UnitOffsetRMSNorm
from runtime.layers.parallel.context_parallel import own_tokens
from runtime.layers.rotary import position_scales, row_order
from runtime.layers.weight import Layer, Shard, SourceTensor, Weight, kv_cache_scale, scaled_shard
from runtime.models.config.model_config import ModelConfig


def reduction_of(device: Device) -> Reduction:
    """How half layers end: with the sum over ranks of all tokens, or of each rank's shard of the tokens."""
    return "reduce_scatter" if device.scatters_tokens else "all_reduce"


def attention_reduction(device: Device) -> Reduction:
    """How attention ends. Where ranks share prompts, the sum has the tokens of one part: these are gathered
    before each rank takes its shard."""
    return "all_reduce" if device.prompt_split is not None else reduction_of(device)


class SelfAttention(Layer):
    """Projections, norms of queries and keys, rotary positions, attention."""

    gathers_tokens = False

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        heads, dim = config.num_heads, config.head_dim
        self.device, self.dtype = device, dtype
        self.qkv_proj = QkvLinear(
            device,
            dtype,
            config.hidden_size,
            heads,
            config.num_kv_heads,
            dim,
            bias=config.qkv_bias,
            value_dim=config.value_dim,
        )
        self.o_proj = Linear(
            device,
            dtype,
            scaled_shard(self.qkv_proj.query_heads, config.value_dim or dim),
            {"": config.hidden_size},
            shard="row",
            bias=config.o_bias,
            reduction=attention_reduction(device),
            ranks=device.head_ranks,
        )
        self.norm_kind, self.norm_eps = config.qk_norm, config.rms_norm_eps
        self.q_norm, self.k_norm = (self._norm(dtype, config, part) for part in ("q", "k"))
        # norms of heads by root mean square in one: weight [query and key heads, head size], and eps
        self.qk_norm: tuple[Tensor, float] | None = None
        self.projection_norm: Callable[[Tensor], Tensor] | None = None  # of queries and keys, in other kinds
        if config.qkv_clip:
            self.projection_norm = partial(torch.clamp, min=-config.qkv_clip, max=config.qkv_clip)
        is_quantized = config.quantization is not None
        self.given_scales = config.cache_scales[index : index + 1]  # in place of the checkpoint's
        self.k_scale, self.v_scale = (kv_cache_scale() if is_quantized else None for _ in range(2))
        own = self.qkv_proj.query_heads
        self.sinks = (
            Weight.empty(
                (own.size,), {"": SourceTensor((heads,), 0, own)}, torch.float32, device.torch_device
            )
            if config.has_sinks
            else None
        )
        rope = config.rope_of(index)
        self.row_order = row_order(rope, dim, is_interleaved=config.is_rope_interleaved)
        self.qkv_proj.row_order = self.row_order
        self.position_scale = config.position_scale_of(index)
        # slopes of linear biases by distance, float32 [heads of this rank]
        self.slopes: Tensor | None = None
        if config.alibi is not None:
            slopes = config.alibi.slopes(heads)[own.start : own.start + own.size]
            self.slopes = torch.tensor(slopes, dtype=torch.float32, device=device.torch_device)
        scores = Scores(config.score_scale, config.windows[index], config.score_cap, slopes=self.slopes)
        self.attention = Attention(device, index, self.qkv_proj.heads[1], dim, scores)
        self.attention.norms_rotated = config.qk_norm in ("rotated", "unit")
        self.attention.chunk = config.chunk if rope.rope_type != "none" else 0
        self.is_rotated = rope.rope_type != "none"

    @property
    def reads_once(self) -> bool:
        """Whether only `qkv_proj` reads what `project` is given."""
        return type(self).project is SelfAttention.project

    def _norm(self, dtype: torch.dtype, config: ModelConfig, part: str) -> RMSNorm | ShardedNormWeight | None:
        dim, shard = config.head_dim, self.qkv_proj.outputs[part]
        match config.qk_norm:
            case "none" | "unit":
                return None
            case "projection":
                return ShardedNormWeight(self.device, dtype, shard, (shard.full,))
            case "head_layer":
                full, start, size = (number // dim for number in (shard.full, shard.start, shard.size))
                return ShardedNormWeight(self.device, dtype, Shard(full, start, size), (full, dim))
        if config.norm == "rms_offset":
            return UnitOffsetRMSNorm(self.device, dtype, dim, config.rms_norm_eps)
        return RMSNorm(self.device, dtype, dim, config.rms_norm_eps, may_have_bias=False)

    def finish_loading(self) -> None:
        """Hands sinks and cache scales to the attention, orders rows for its rotation, and joins norms."""
        if self.sinks is not None:
            self.attention.scores = replace(self.attention.scores, sinks=self.sinks.tensor)
        if self.row_order is not None:
            self._reorder(self.row_order)
        if self.q_norm is not None and self.k_norm is not None:
            self._join_norms(self.q_norm.weight.tensor, self.k_norm.weight.tensor)
        if self.norm_kind == "unit" and self.is_rotated:
            (q_heads, kv_heads, _), dim = self.qkv_proj.heads, self.attention.key_dim
            weight = torch.ones(q_heads + kv_heads, dim, dtype=self.dtype, device=self.device.torch_device)
            self.qk_norm = weight, self.norm_eps
        if self.k_scale is not None and self.v_scale is not None:
            scales = self.k_scale.tensor.item(), self.v_scale.tensor.item()
            self.attention.cache_scales = None if scales == (1, 1) else scales
            self.k_scale = self.v_scale = None
        if self.given_scales:
            self.attention.cache_scales = self.given_scales[0], self.given_scales[0]

    def _reorder(self, order: list[int]) -> None:
        """Brings the rows of each query and key head, and the numbers of their norms, into this order."""
        if self.qkv_proj.ggml is not None:
            raise ModelError(
                "rows of ggml's types cannot be reordered for the rotary positions of this model; use the "
                "version of the model in safetensors"
            )
        dim = len(order)
        num_rows = sum(self.qkv_proj.heads[:2]) * dim
        for rows in self.qkv_proj.row_tensors():
            heads = rows[:num_rows].unflatten(0, (-1, dim))
            heads.copy_(heads[:, order])
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                weights = norm.weight.tensor.view(-1, dim)
                weights.copy_(weights[:, order])

    def _join_norms(self, q_weight: Tensor, k_weight: Tensor) -> None:
        q_heads, kv_heads, _ = self.qkv_proj.heads
        match self.norm_kind:
            case "projection":
                weights = q_weight, k_weight
                self.projection_norm = ProjectionNorms(self.device, self.qkv_proj, weights, self.norm_eps)
            case "head_layer":
                self.projection_norm = HeadLayerNorms(
                    self.qkv_proj.heads, (q_weight, k_weight), self.norm_eps
                )
            case _:
                joined = torch.cat((q_weight.expand(q_heads, -1), k_weight.expand(kv_heads, -1)))
                self.qk_norm = joined, self.norm_eps

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> (queries [T, H, D],); keys and values go to the cache."""
        qkv = self.qkv_proj.forward(x)
        if self.projection_norm is not None:
            qkv = self.projection_norm(qkv)
        queries = self.attention.prepare(qkv, self.qk_norm, cos, sin, batch)
        if self.position_scale is not None:
            positions = own_tokens(batch.part, batch.positions)
            queries = queries * position_scales(self.position_scale, positions).to(queries.dtype)
        return (queries,)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * D], before `o_proj`."""
        return self.attention.forward(*queries, batch)
