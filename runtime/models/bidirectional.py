"""Decoders of the Llama line whose tokens see the whole text, before and behind them: embedders made of
language models (EmbeddingGemma, 2025). They keep no keys and values."""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.bidirectional import bidirectional_attention
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.fused_ops import split_and_rotate
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama
from runtime.models.self_attention import SelfAttention


class BidirectionalSelfAttention(SelfAttention):
    """As SelfAttention, in both directions."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        super().__init__(device, dtype, config, index)
        self.reach = config.reaches[index] if config.reaches else 0
        # the scores' scale is on queries, beside that of attention itself
        self.scale = config.score_scale * config.head_dim**0.5
        _, num_kv, _ = self.qkv_proj.heads
        self.like_keys = torch.empty(0, num_kv, config.head_dim, device="meta")

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> queries, keys and values, [T, H, D] each."""
        q, k, v = split_and_rotate(
            self.device.ops, self.qkv_proj.forward(x), self.like_keys, self.qk_norm, cos, sin
        )
        each = q.shape[1] // k.shape[1]
        return q * self.scale, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * D], before `o_proj`."""
        q, k, v = queries
        return bidirectional_attention(q, k, v, batch.attention, self.reach)


class BidirectionalDecoder(Llama):
    """A decoder in both directions, to embed or to classify. See Model."""

    attention_class = BidirectionalSelfAttention

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """None: no layer needs a key/value cache."""
        return []
