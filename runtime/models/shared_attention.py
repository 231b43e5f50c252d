"""Attention of Gemma 3n and Gemma 4: all heads are normalized, and layers may read the keys and values of an
earlier one."""

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.paged import Attention
from runtime.layers.linear import Linear, QkvLinear
from runtime.layers.norm import RMSNorm
from runtime.layers.weight import Layer, Shard, scaled_shard
from runtime.models.config.model_config import ModelConfig
from runtime.models.self_attention import reduction_of


class SharedAttention(Layer):
    """Attention whose heads are all normalized, values too, and whose keys and values may be an earlier
    layer's: then it has queries alone. See AttentionLayer."""

    gathers_tokens = False

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        config, heads_of_all = config.of_layer(index), config.global_heads
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        source = config.kv_sources[index]
        self.ops, self.dim, self.eps = device.ops, dim, config.rms_norm_eps
        kv_heads = QkvLinear(device, dtype, hidden, heads, config.num_kv_heads, dim, bias=config.qkv_bias)
        self.num_kv_heads = kv_heads.heads[1]
        self.is_shared = source != index
        is_global = heads_of_all is not None and not config.windows[index]
        # values are the keys, before they are normalized and rotated
        self.shares_values = is_global and heads_of_all is not None and heads_of_all.shares_values
        parts = ("q",) if self.is_shared else ("q", "k") if self.shares_values else ("q", "k", "v")
        outputs: dict[str, int | Shard] = {part: kv_heads.outputs[part] for part in parts}
        self.qkv_proj = Linear(device, dtype, hidden, outputs, shard="column", bias=config.qkv_bias)
        self.o_proj = Linear(
            device,
            dtype,
            scaled_shard(kv_heads.query_heads, dim),
            {"": hidden},
            shard="row",
            bias=config.o_bias,
            reduction=reduction_of(device),
            ranks=device.head_ranks,
        )
        self.q_norm = RMSNorm(device, dtype, dim, self.eps, may_have_bias=False)
        self.k_norm = None if self.is_shared else RMSNorm(device, dtype, dim, self.eps, may_have_bias=False)
        self.ones = torch.ones(dim, dtype=dtype, device=device.torch_device)
        scores = Scores(config.score_scale, config.windows[index], config.score_cap)
        # caches are those of the layers that have their own
        place = sum(config.kv_sources[i] == i for i in range(source))
        self.attention = Attention(device, place, self.num_kv_heads, dim, scores)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> (queries [T, H, D],); keys and values of its own go to the cache."""
        heads = self.qkv_proj.forward(x).unflatten(1, (-1, self.dim))
        if self.k_norm is None:
            return (self.ops.rotary(self.q_norm.forward(heads), cos, sin),)
        num_kv = self.num_kv_heads
        if self.shares_values:
            q, k = heads.split((heads.shape[1] - num_kv, num_kv), dim=1)
            v = k
        else:
            q, k, v = heads.split((heads.shape[1] - 2 * num_kv, num_kv, num_kv), dim=1)
        k = self.ops.rotary(self.k_norm.forward(k), cos, sin)
        self.attention.store(k, self.ops.rms_norm(v, self.ones, self.eps), batch)
        return (self.ops.rotary(self.q_norm.forward(q), cos, sin),)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * D], before `o_proj`."""
        return self.attention.forward(*queries, batch)
