"""ModernBERT (Warner et al., 2024): an encoder with rotary positions, to embed or to classify.

Pre-norm blocks, the first without a norm before its attention, of bidirectional attention and a gated
feed-forward. Most layers attend to a window on both sides, with rotary positions of their own base.
"""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.bidirectional import BidirectionalPlan, bidirectional_attention
from runtime.layers.attention.paged import Attention
from runtime.layers.embedding import Embedding
from runtime.layers.linear import Linear, QkvLinear
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.projections import Projections
from runtime.layers.rotary import Rotary
from runtime.layers.weight import Layer, PackedModules, channel_shard, scaled_shard
from runtime.models.base import Renames
from runtime.models.bert import activate
from runtime.models.config.encoder_config import RotaryEncoder
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.rope_config import Rope
from runtime.models.fused_tensors import FusedModules, equal_parts

Tables = tuple[Tensor, Tensor]


class Embeddings(Layer):
    """Embeddings of words, normalized."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, *, bias: bool) -> None:
        self.tok_embeddings = Embedding(device, dtype, config.vocab_size, config.hidden_size)
        self.norm = LayerNorm(device, dtype, config.hidden_size, config.rms_norm_eps, bias=bias)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return self.norm.forward(self.tok_embeddings.forward(token_ids))


class SelfAttention(Layer):
    """Projections, rotary positions, attention in both directions."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        rotary = rotary_encoder(config)
        hidden, heads, self.head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.ops = device.ops
        self.window = rotary.windows[index]
        self.qkv = QkvLinear(device, dtype, hidden, heads, heads, self.head_dim, bias=rotary.attention_bias)
        values = scaled_shard(self.qkv.query_heads, self.head_dim)
        self.Wo = Linear(device, dtype, values, {"": hidden}, shard="row", bias=rotary.attention_bias)

    def forward(self, x: Tensor, tables: Tables, plan: BidirectionalPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        q, k, v = self.qkv.forward(x).view(len(x), -1, self.head_dim).split(self.qkv.heads, dim=1)
        q, k = (self.ops.rotary(part, *tables) for part in (q, k))
        return self.Wo.forward(bidirectional_attention(q, k, v, plan, self.window))


class GatedFeedForward(Layer):
    """down(activation(first(x)) * gate(x))."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, activation: str) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, rotary_encoder(config).mlp_bias
        self.activation = activation
        own = channel_shard(inner, device.collectives, "intermediate_size")
        self.both = Linear(device, dtype, hidden, {"first": own, "gate": own}, shard="column", bias=bias)
        self.Wo = Linear(device, dtype, own, {"": hidden}, shard="row", bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        first, gate = self.both.forward(x).chunk(2, dim=-1)
        return self.Wo.forward(activate(self.activation, first) * gate)


class ModernBertLayer(Layer):
    """One block: attention and feed-forward, each over its normalized input and added to it."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int, activation: str
    ) -> None:
        size, eps, bias = config.hidden_size, config.rms_norm_eps, rotary_encoder(config).norm_bias
        self.attn_norm = LayerNorm(device, dtype, size, eps, bias=bias) if index else None
        self.attn = SelfAttention(device, dtype, config, index)
        self.mlp_norm = LayerNorm(device, dtype, size, eps, bias=bias)
        self.mlp = GatedFeedForward(device, dtype, config, activation)

    def forward(self, x: Tensor, tables: Tables, plan: BidirectionalPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        normed = x if self.attn_norm is None else self.attn_norm.forward(x)
        x = x + self.attn.forward(normed, tables, plan)
        return x + self.mlp.forward(self.mlp_norm.forward(x))


class PredictionHead(Layer):
    """What comes before a classifier's last layer."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, activation: str) -> None:
        size, rotary = config.hidden_size, rotary_encoder(config)
        self.activation = activation
        self.dense = ReplicatedLinear(device, dtype, size, size, bias=rotary.head_bias)
        self.norm = LayerNorm(device, dtype, size, config.rms_norm_eps, bias=rotary.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        return self.norm.forward(activate(self.activation, self.dense.forward(x)))


class ModernBert(Layer):
    """An encoder. See Model."""

    fused_modules: FusedModules = {
        "Wqkv": equal_parts("query", "key", "value"),
        "Wi": equal_parts("first", "gate"),
    }
    renames: Renames = ()
    packed_modules: PackedModules = {
        "query": ("qkv", "q"),
        "key": ("qkv", "k"),
        "value": ("qkv", "v"),
        "first": ("both", "first"),
        "gate": ("both", "gate"),
    }
    attentions: list[Attention] = []  # an encoder needs no key/value cache

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        assert config.encoder is not None and config.pooling is not None
        rotary, encoder = rotary_encoder(config), config.encoder
        self.embeddings = Embeddings(device, dtype, config, bias=rotary.norm_bias)
        self.layers = [
            ModernBertLayer(device.of_layer(i), dtype, config, i, encoder.activation)
            for i in range(config.num_layers)
        ]
        self.final_norm = LayerNorm(
            device, dtype, config.hidden_size, config.rms_norm_eps, bias=rotary.norm_bias
        )
        self.windows = rotary.windows
        self.rotary = {
            is_local: Rotary(Rope(rope_theta=theta), config.head_dim, device.ops, device.torch_device)
            for is_local, theta in ((False, rotary.global_theta), (True, rotary.local_theta))
        }
        classifies = config.pooling.task == "classify"
        dense = config.pooling.dense
        self.projections = Projections(device, dense) if dense else None
        self.head = PredictionHead(device, dtype, config, encoder.head_activation) if classifies else None
        self.classifier = (
            ReplicatedLinear(device, dtype, config.hidden_size, config.pooling.size, bias=True)
            if classifies
            else None
        )
        self.ignored_weights = () if classifies else (r"^(head|decoder|classifier)\.",)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The tokens' vectors, [T, hidden]."""
        tables = {is_local: rotary.tables(batch.positions) for is_local, rotary in self.rotary.items()}
        x = self.embeddings.forward(batch.token_ids)
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer.forward(x, tables[window > 0], batch.attention)
        return self.final_norm.forward(x)

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Embeddings or class scores, float32 [N, size]."""
        pooled = pooling.mean(hidden) if pooling.mode == "mean" else pooling.select(hidden)
        if self.projections is not None:
            return self.projections.forward(pooled)
        if self.head is None or self.classifier is None:
            return pooled.float()
        return self.classifier.forward(self.head.forward(pooled.to(hidden.dtype))).float()


def rotary_encoder(config: ModelConfig) -> RotaryEncoder:
    """What ModernBERT's config.json says beyond BERT's."""
    assert config.encoder is not None and config.encoder.rotary is not None
    return config.encoder.rotary
