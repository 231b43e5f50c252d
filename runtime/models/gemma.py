"""Gemma 2 (Google, 2024).

Unlike Llama: embeddings are scaled; a block normalizes the inputs of attention and feed-forward, and their
outputs as well; weights of norms are stored less 1; the feed-forward gates with gelu; every second layer has
a sliding window; scores and logits have caps, and scores have a scale of their own.
"""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.feed_forward import FeedForward
from runtime.layers.norm import UnitOffsetRMSNorm
from runtime.layers.weight import Layer
from runtime.models.base import AttentionLayer
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama


class GemmaDecoderLayer(Layer):
    """One block. See DecoderLayer."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = UnitOffsetRMSNorm(device, dtype, hidden, eps)
        self.self_attn = attention_class(device, dtype, config, index)
        self.post_attention_layernorm = UnitOffsetRMSNorm(device, dtype, hidden, eps)
        self.pre_feedforward_layernorm = UnitOffsetRMSNorm(device, dtype, hidden, eps)
        self.mlp = FeedForward(
            device, dtype, hidden, config.intermediate_size, bias=config.mlp_bias, gelu=True
        )
        self.post_feedforward_layernorm = UnitOffsetRMSNorm(device, dtype, hidden, eps)

    def before_attention(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """See DecoderLayer.before_attention."""
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.project(x, cos, sin, batch), residual

    def after_attention(
        self, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer.after_attention."""
        x = self.post_attention_layernorm.forward(self.self_attn.o_proj.forward(attended))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm.forward(self.mlp.forward(x)), residual


class Gemma(Llama):
    """Gemma 2. See GenerativeModel."""

    layer_class = GemmaDecoderLayer
    norm_class = UnitOffsetRMSNorm

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        # rounded to the dtype, as in training
        self.embed_scale = torch.tensor(config.hidden_size**0.5).to(dtype).item()
        self.logit_cap = config.logit_cap

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> scaled embeddings [T, hidden]."""
        return self.embed_tokens.forward(token_ids) * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> capped logits, float32 [N, vocabulary]."""
        logits = super().logits(hidden)
        return torch.tanh(logits / self.logit_cap) * self.logit_cap if self.logit_cap else logits
