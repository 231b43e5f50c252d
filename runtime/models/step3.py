"""Step 3.5 (StepFun, 2026): layers with a window have other numbers of query heads, each head's attention
output has a gate, and some layers clamp the activations of their feed-forwards. AFMoE (Arcee, 2025) has a
gate for each number of the output."""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.weight import scaled_shard
from runtime.models.config.model_config import ModelConfig
from runtime.models.llama import Llama
from runtime.models.self_attention import SelfAttention


class HeadGatedAttention(SelfAttention):
    """sigmoid(gate) * attention before the output projection, with a gate for each head, or for each of its
    numbers."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        own = config.of_layer(index)
        super().__init__(device, dtype, own, index)
        self.g_proj = (
            Linear(
                device,
                dtype,
                own.hidden_size,
                {"": scaled_shard(self.qkv_proj.query_heads, config.gate_dim)},
                shard="column",
                ranks=device.head_ranks,
            )
            if config.gate_dim
            else None
        )

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> (queries [T, H, D],), and gates [T, H * G]; keys and values go to the cache."""
        queries = super().project(x, cos, sin, batch)
        return queries if self.g_proj is None else (*queries, self.g_proj.forward(x))

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Gated attention output [T, H * D], before `o_proj`."""
        q, *gates = queries
        attended = self.attention.forward(q, batch)
        if not gates:
            return attended
        heads = gates[0].sigmoid().unflatten(1, (q.shape[1], -1))
        return (attended.unflatten(1, (q.shape[1], -1)) * heads).flatten(1)


class Step3(Llama):
    """Step 3.5. See GenerativeModel."""

    attention_class = HeadGatedAttention
