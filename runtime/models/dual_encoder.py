"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): a tower for texts and one for images, whose
vectors can be compared.

A text is the projection of its last token. An image is a sequence of one token, whose vector the media
encoder has made.
"""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.bidirectional import BidirectionalPlan, bidirectional_attention
from runtime.layers.attention.paged import Attention
from runtime.layers.embedding import Embedding
from runtime.layers.linear import Linear, QkvLinear
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedEmbedding, ReplicatedLinear
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.weight import Layer, PackedModules, channel_shard, scaled_shard
from runtime.models.config.dual_config import DualText
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.open_encoder import MediaEncoder, open_encoder


class TextAttention(Layer):
    """Attention of the tokens of a text."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, dual: DualText) -> None:
        heads, self.head_dim, self.is_causal = config.num_heads, config.head_dim, dual.is_causal
        self.qkv_proj = QkvLinear(device, dtype, config.hidden_size, heads, heads, config.head_dim, bias=True)
        values = scaled_shard(self.qkv_proj.query_heads, config.head_dim)
        self.out_proj = Linear(device, dtype, values, {"": config.hidden_size}, shard="row", bias=True)

    def forward(self, x: Tensor, plan: BidirectionalPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        qkv = self.qkv_proj.forward(x).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split(self.qkv_proj.heads, dim=1)
        return self.out_proj.forward(bidirectional_attention(q, k, v, plan, is_causal=self.is_causal))


class TextMlp(Layer):
    """Two linear layers with an activation between them."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, dual: DualText) -> None:
        self.activation, hidden = dual.activation, config.hidden_size
        own = channel_shard(config.intermediate_size, device.collectives, "intermediate_size")
        self.fc1 = Linear(device, dtype, hidden, {"": own}, shard="column", bias=True)
        self.fc2 = Linear(device, dtype, own, {"": hidden}, shard="row", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.fc2.forward(activate(self.activation, self.fc1.forward(x)))


class TextLayer(Layer):
    """One block, with norms before attention and feed-forward."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, dual: DualText) -> None:
        self.layer_norm1 = LayerNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.self_attn = TextAttention(device, dtype, config, dual)
        self.layer_norm2 = LayerNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.mlp = TextMlp(device, dtype, config, dual)

    def forward(self, x: Tensor, plan: BidirectionalPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        x = x + self.self_attn.forward(self.layer_norm1.forward(x), plan)
        return x + self.mlp.forward(self.layer_norm2.forward(x))


class DualEncoder(Layer):
    """Both towers. See Model."""

    ignored_weights: tuple[str, ...] = (r"^logit_(scale|bias)$", r"\.position_ids$")
    packed_modules: PackedModules = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
    }
    renames: Renames = (
        ("text_model.encoder.layers.", "layers."),
        ("text_model.embeddings.token_embedding.", "token_embedding."),
        ("text_model.embeddings.position_embedding.", "position_embedding."),
        ("text_model.head.", "text_projection."),
        ("text_model.final_layer_norm.", "final_layer_norm."),
        ("vision_model.encoder.layers.", "media_encoder.layers."),
        ("vision_model.", "media_encoder."),
        ("visual_projection.", "media_encoder.visual_projection."),
    )
    attentions: list[Attention] = []  # no key/value cache

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        assert config.encoder is not None and config.dual is not None
        size, dual = config.hidden_size, config.dual
        self.token_embedding = Embedding(device, dtype, config.vocab_size, size)
        self.position_embedding = ReplicatedEmbedding(device, dtype, config.encoder.num_positions, size)
        self.layers = [TextLayer(device.of_layer(i), dtype, config, dual) for i in range(config.num_layers)]
        self.final_layer_norm = LayerNorm(device, dtype, size, config.rms_norm_eps)
        self.text_projection = ReplicatedLinear(
            device, dtype, size, dual.images.output_size, bias=dual.has_bias
        )
        self.media_encoder: MediaEncoder = open_encoder(device, dtype, dual.images)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The tokens' vectors, projected, [T, output size]; those of images are as they were encoded."""
        x = self.token_embedding.forward(batch.token_ids)
        x = x + self.position_embedding.forward(batch.positions)
        for layer in self.layers:
            x = layer.forward(x, batch.attention)
        x = self.text_projection.forward(self.final_layer_norm.forward(x))
        if batch.embeds is None:
            return x
        return x.index_copy(0, batch.embeds[0], batch.embeds[1].to(x.dtype))

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Embeddings, float32 [N, output size]."""
        return pooling.select(hidden).float()
