"""Gemma 2 (Google, 2024).

Unlike Llama: embeddings are scaled; a block normalises what attention and feed-forward are given, and again
what they give; weights of norms are stored less 1; the feed-forward gates with gelu; every second layer
slides a window; scores and logits have caps, and scores a scale of their own.
"""

from typing import Any

import torch
from torch import Tensor

from runtime.devices.base import Batch, Device
from runtime.layers.feed_forward import FeedForward
from runtime.layers.norm import UnitNorm
from runtime.layers.weight import Layer
from runtime.models.config import ModelConfig
from runtime.models.llama import Llama


class GemmaDecoder(Layer):
    """One block."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int, attention: type[Any]
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = UnitNorm(device, dtype, hidden, eps)
        self.self_attn = attention(device, dtype, config, index)
        self.post_attention_layernorm = UnitNorm(device, dtype, hidden, eps)
        self.pre_feedforward_layernorm = UnitNorm(device, dtype, hidden, eps)
        self.mlp = FeedForward(
            device, dtype, hidden, config.intermediate_size, bias=config.mlp_bias, gelu=True
        )
        self.post_feedforward_layernorm = UnitNorm(device, dtype, hidden, eps)

    def before(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: Batch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """See llama.Decoder."""
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.project(x, cos, sin, batch), residual

    def after(self, attended: Tensor, residual: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.post_attention_layernorm.forward(self.self_attn.o_proj.forward(attended))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm.forward(self.mlp.forward(x)), residual


class Gemma(Llama):
    """See Llama."""

    decoder = GemmaDecoder
    norm_layer = UnitNorm

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        # rounded, as it was in training
        self.embed_scale = torch.tensor(config.hidden_size**0.5).to(dtype).item()
        self.logit_cap = config.logit_cap

    def embedded(self, token_ids: Tensor) -> Tensor:
        return self.embed_tokens.forward(token_ids) * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return torch.tanh(logits / self.logit_cap) * self.logit_cap if self.logit_cap else logits
