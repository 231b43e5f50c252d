"""Decoders whose tokens have an embedding for each layer, besides the one that they begin with (Gemma 3n,
Gemma 4)."""

from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import gelu

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.embedding import Embedding
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.weight import Layer
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama
from runtime.models.shared_attention import SharedAttention

# names in checkpoints -> GatedEmbedding in a layer
OWN_NAMES = (
    (".per_layer_input_gate.", ".own.gate."),
    (".per_layer_projection.", ".own.projection."),
    (".post_per_layer_input_norm.", ".own.norm."),
)


class GatedEmbedding(Layer):
    """What a layer adds of a token's embedding for it: norm(projection(gelu(gate(x)) * embedding))."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        assert config.layer_embeddings is not None
        hidden, width = config.hidden_size, config.layer_embeddings.width
        self.gate = ReplicatedLinear(device, dtype, hidden, width, bias=False)
        self.projection = ReplicatedLinear(device, dtype, width, hidden, bias=False)
        self.norm = RMSNorm(device, dtype, hidden, config.rms_norm_eps)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """x [T, hidden] and embeddings [T, width] -> [T, hidden]."""
        gated = gelu(self.gate.forward(x), approximate="tanh") * own
        return self.norm.forward(self.projection.forward(gated))


class LayerEmbeddedLlama(Llama):
    """A decoder with attention that layers share, and with embeddings for its layers where the configuration
    has them."""

    attention_class = SharedAttention

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        self.renames = (*self.renames, *OWN_NAMES)
        self.embed_tokens_per_layer: Embedding | None = None
        self.per_layer_model_projection: ReplicatedLinear | None = None
        self.per_layer_projection_norm: RMSNorm | None = None
        if (sizes := config.layer_embeddings) is not None:
            hidden, width = config.hidden_size, sizes.width
            self.own_width, self.own_vocab, self.projection_scale = width, sizes.vocab, hidden**-0.5
            self.own_scale = torch.tensor(width**0.5).to(dtype).item()
            total = config.num_layers * width
            self.embed_tokens_per_layer = Embedding(device, dtype, sizes.vocab, total)
            self.per_layer_model_projection = ReplicatedLinear(device, dtype, hidden, total, bias=False)
            self.per_layer_projection_norm = RMSNorm(
                device, dtype, width, config.rms_norm_eps, may_have_bias=False
            )
        shared = [str(i) for i in range(config.num_layers) if not config.has_own_keys(i)]
        if shared:  # checkpoints may have what layers do not use
            layers = rf"(^|\.)layers\.({'|'.join(shared)})\.self_attn\."
            self.ignored_weights = (*self.ignored_weights, layers + r"(k_proj|v_proj|k_norm|v_norm)\.")

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """The attentions that have a key/value cache of their own, in order."""
        attentions = (layer.self_attn for layer in self.layers)
        return [one.attention for one in attentions if isinstance(one, SharedAttention) and not one.is_shared]

    def inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """What the first layer is given, [T, hidden], and what each layer is given besides, [layers, T,
        width] or None. A token that has an embedding of a client in place of an id has the part alone that
        follows from it."""
        x = self.embed(batch.token_ids)
        if batch.embeds is not None:
            x = x.index_copy(0, batch.embeds[0], batch.embeds[1].to(x.dtype))
        embedding, projection = self.embed_tokens_per_layer, self.per_layer_model_projection
        norm = self.per_layer_projection_norm
        if embedding is None or projection is None or norm is None:
            return x, None
        projected = (projection.forward(x) * self.projection_scale).unflatten(1, (-1, self.own_width))
        projected = norm.forward(projected)
        known = torch.where(batch.token_ids < self.own_vocab, batch.token_ids, 0)
        own = embedding.forward(known) * self.own_scale
        mixed = (projected + own.view_as(projected)) * sqrt(0.5)
        if batch.embeds is not None:
            mixed = mixed.index_copy(0, batch.embeds[0], projected[batch.embeds[0]])
        return x, mixed.transpose(0, 1)
