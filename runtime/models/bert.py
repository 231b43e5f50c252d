"""The BERT line of encoders (Devlin et al., 2019): BERT, RoBERTa, XLM-RoBERTa and DistilBERT, to embed or to
classify.

Post-norm blocks of bidirectional attention and a plain feed-forward, with learned absolute positions. The
families differ in the names of their weights, in where positions begin, and in whether there are token types.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.bidirectional import BidirectionalPlan, bidirectional_attention
from runtime.layers.attention.paged import Attention
from runtime.layers.embedding import Embedding
from runtime.layers.linear import Linear, QkvLinear
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedEmbedding, ReplicatedLinear
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.projections import Projections
from runtime.layers.weight import Layer, PackedModules, channel_shard, scaled_shard
from runtime.models.config.encoder_config import Encoder
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.renames import Renames


def activate(name: str, x: Tensor) -> Tensor:
    """The activation of this name (see Encoder.activation and Encoder.head_activation)."""
    match name:
        case "gelu":
            return gelu(x)
        case "gelu_tanh":
            return gelu(x, approximate="tanh")
        case "relu":
            return relu(x)
        case "silu":
            return silu(x)
    return torch.tanh(x)


class Embeddings(Layer):
    """Embeddings of word, position and token type, summed and normalized."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, encoder: Encoder) -> None:
        size = config.hidden_size
        self.first_position = encoder.first_position
        self.word_embeddings = Embedding(device, dtype, config.vocab_size, size)
        self.position_embeddings = ReplicatedEmbedding(device, dtype, encoder.num_positions, size)
        self.token_type_embeddings = (
            ReplicatedEmbedding(device, dtype, encoder.num_types, size) if encoder.num_types else None
        )
        self.norm = LayerNorm(device, dtype, size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden]."""
        x = self.word_embeddings.forward(batch.token_ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings.forward(batch.types)
        return self.norm.forward(x + self.position_embeddings.forward(batch.positions + self.first_position))


class EncoderLayer(Layer):
    """One block: attention and feed-forward, each added to its input and normalized after."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, activation: str) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.activation = activation
        self.head_dim = config.head_dim
        self.qkv = QkvLinear(
            device, dtype, hidden, config.num_heads, config.num_heads, config.head_dim, bias=True
        )
        values = scaled_shard(self.qkv.query_heads, config.head_dim)
        self.attention_out = Linear(device, dtype, values, {"": hidden}, shard="row", bias=True)
        self.attention_norm = LayerNorm(device, dtype, hidden, eps)
        own = channel_shard(inner, device.collectives, "intermediate_size")
        self.up = Linear(device, dtype, hidden, {"": own}, shard="column", bias=True)
        self.down = Linear(device, dtype, own, {"": hidden}, shard="row", bias=True)
        self.norm = LayerNorm(device, dtype, hidden, eps)

    def forward(self, x: Tensor, plan: BidirectionalPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        q, k, v = self.qkv.forward(x).view(len(x), -1, self.head_dim).split(self.qkv.heads, dim=1)
        x = self.attention_norm.forward(
            x + self.attention_out.forward(bidirectional_attention(q, k, v, plan))
        )
        return self.norm.forward(x + self.down.forward(activate(self.activation, self.up.forward(x))))


class Bert(Layer):
    """An encoder. See Model."""

    ignored_weights: tuple[str, ...] = ()
    renames: Renames = (
        ("embeddings.LayerNorm.", "embeddings.norm."),
        ("encoder.layer.", "layers."),
        ("attention.self.", ""),
        ("attention.output.dense.", "attention_out."),
        ("attention.output.LayerNorm.", "attention_norm."),
        ("intermediate.dense.", "up."),
        (".output.dense.", ".down."),
        (".output.LayerNorm.", ".norm."),
        # DistilBERT
        ("transformer.layer.", "layers."),
        ("attention.q_lin.", "query."),
        ("attention.k_lin.", "key."),
        ("attention.v_lin.", "value."),
        ("attention.out_lin.", "attention_out."),
        ("sa_layer_norm.", "attention_norm."),
        ("output_layer_norm.", "norm."),
        ("ffn.lin1.", "up."),
        ("ffn.lin2.", "down."),
        # heads: BERT, RoBERTa, DistilBERT
        ("pooler.dense.", "dense."),
        ("classifier.dense.", "dense."),
        ("pre_classifier.", "dense."),
        ("classifier.out_proj.", "score."),
        ("classifier.", "score."),
    )
    packed_modules: PackedModules = {"query": ("qkv", "q"), "key": ("qkv", "k"), "value": ("qkv", "v")}
    attentions: list[Attention] = []  # an encoder needs no key/value cache

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        assert config.encoder is not None and config.pooling is not None
        size, self.head_activation = config.hidden_size, config.encoder.head_activation
        self.embeddings = Embeddings(device, dtype, config, config.encoder)
        self.layers = [
            EncoderLayer(device.of_layer(i), dtype, config, config.encoder.activation)
            for i in range(config.num_layers)
        ]
        has_head = config.pooling.task == "classify"
        dense = config.pooling.dense
        self.projections = Projections(device, dense) if dense else None
        self.dense = ReplicatedLinear(device, dtype, size, size, bias=True) if has_head else None
        self.score = (
            ReplicatedLinear(device, dtype, size, config.pooling.size, bias=True) if has_head else None
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The tokens' vectors, [T, hidden]."""
        x = self.embeddings.forward(batch)
        for layer in self.layers:
            x = layer.forward(x, batch.attention)
        return x

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Embeddings or class scores, float32 [N, size]."""
        selected = pooling.mean(hidden) if pooling.mode == "mean" else pooling.select(hidden)
        if self.projections is not None:
            return self.projections.forward(selected)
        if self.dense is None or self.score is None:
            return selected.float()
        return self.score.forward(activate(self.head_activation, self.dense.forward(selected))).float()
