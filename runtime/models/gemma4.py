"""Gemma 4's dense text models: layers without a window have heads of another size, layers have a scale, and
some have embeddings of their own (models/config/altup_config.py)."""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.feed_forward import FeedForward
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.weight import Layer
from runtime.models.base import AttentionLayer, CompiledLayer, Pieces
from runtime.models.config.model_config import ModelConfig
from runtime.models.feed_forwards import dense_reduction, shared_tokens
from runtime.models.layer_embeddings import GatedEmbedding, LayerEmbeddedLlama


class Gemma4DecoderLayer(Layer):
    """One block."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(device, dtype, config.hidden_size, config.rms_norm_eps)

        self.input_layernorm = norm()
        self.self_attn = attention_class(device, dtype, config, index)
        self.attention_output_norm = norm()
        self.post_attention_layernorm = norm()
        self.mlp = FeedForward(
            device,
            dtype,
            config.hidden_size,
            config.of_layer(index).intermediate_size,
            reduction=dense_reduction(device, has_bias=False),
            activation="gelu_tanh",
        )
        self.mlp_output_norm = norm()
        self.shared = shared_tokens(device, config, self.mlp, has_experts=False)
        self.own = None if config.layer_embeddings is None else GatedEmbedding(device, dtype, config)
        self.layer_scalar = replicated_weight(device, dtype, 1)

    def piecewise(
        self, x: Tensor, own: Tensor | None, tables: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Pieces:
        """[T, hidden] and the layer's own embeddings [T, width] -> [T, hidden]; yields where it attends."""
        queries = self.self_attn.project(self.input_layernorm.forward(x), *tables, batch)
        attended = yield self.self_attn, queries
        x = x + self.attention_output_norm.forward(self.self_attn.o_proj.forward(attended))
        given = self.shared.join(self.post_attention_layernorm.forward(x), batch)
        x = x + self.mlp_output_norm.forward(self.shared.divide(self.mlp.forward(given), batch))
        if self.own is not None and own is not None:
            x = x + self.own.forward(x, own)
        return x * self.layer_scalar.tensor


class Gemma4(LayerEmbeddedLlama):
    """Gemma 4. See GenerativeModel."""

    layer_class = Gemma4DecoderLayer

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise. `compiled` is not used."""
        tables = [rotary.tables(batch.positions) for rotary in self.rotaries]
        x, own = self.inputs(batch)
        for i, (layer, kind) in enumerate(zip(self.layers, self.rotary_of_layer, strict=True)):
            x = yield from layer.piecewise(x, None if own is None else own[i], tables[kind], batch)
        return x
