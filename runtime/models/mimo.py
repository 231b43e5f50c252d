"""MiMo-V2-Flash (Xiaomi, 2025): values are narrower than keys and have a scale, layers with a window have
more key/value heads than the others, and attention sinks."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.base import Device, ForwardBatch
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama
from runtime.models.self_attention import SelfAttention


class NarrowValueAttention(SelfAttention):
    """Attention whose values are narrower than its keys: the cache has zeros behind them."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        own = config.of_layer(index)
        super().__init__(device, dtype, own, index)
        self.value_dim = own.value_dim or own.head_dim
        self.missing = own.head_dim - self.value_dim  # zeros behind a value
        self.value_scale = own.value_scale

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> (queries [T, H, D],); keys and values go to the cache."""
        qkv = self.qkv_proj.forward(x)
        rest = self.qkv_proj.heads[2] * self.value_dim
        values = qkv[:, -rest:].unflatten(1, (-1, self.value_dim)) * self.value_scale
        whole = torch.cat((qkv[:, :-rest], pad(values, (0, self.missing)).flatten(1)), dim=1)
        return (self.attention.prepare(whole, None, cos, sin, batch),)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * V], before `o_proj`."""
        heads = self.attention.forward(*queries, batch).unflatten(1, (queries[0].shape[1], -1))
        return heads[..., : self.value_dim].flatten(1)


class MiMoV2(Llama):
    """MiMo-V2-Flash. See GenerativeModel. Its next-token layers are those of a DraftHead."""

    attention_class = NarrowValueAttention
    ignored_weights: tuple[str, ...] = (*Llama.ignored_weights, r"^model\.mtp\.")
