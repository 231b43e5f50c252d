"""Attention with a gate on its output, which the query projection makes (Qwen3-Next)."""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.linear import Linear, OutputRows, QkvLinear
from runtime.layers.weight import scaled_shard
from runtime.models.config.model_config import ModelConfig
from runtime.models.self_attention import SelfAttention


class GatedQkvLinear(QkvLinear):
    """Queries, keys and values in one product, with a gate behind the query of each head in the checkpoint.
    When the rows have been put into order, outputs are all queries, keys and values, and then all gates."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        heads, dim = config.num_heads, config.head_dim
        super().__init__(
            device, dtype, config.hidden_size, heads, config.num_kv_heads, dim, bias=config.qkv_bias
        )
        self.gate_size = self.heads[0] * dim
        self.dim = dim
        shard = self.outputs["q"]
        self.outputs["q"] = scaled_shard(shard, 2)
        self.size += shard.size

    def output_rows(self, part: str) -> list[OutputRows]:
        """See Linear.output_rows; those of queries, and those of their gates."""
        ((first, rows),) = Linear.output_rows(self, part)
        if part == "v":
            return [OutputRows(first - self.gate_size, rows)]
        if part == "k":
            return [OutputRows(first - self.gate_size, self.ordered(rows))]
        queries, gates = (half.flatten() for half in rows.unflatten(0, (-1, 2, self.dim)).unbind(1))
        return [OutputRows(0, self.ordered(queries)), OutputRows(self.size - self.gate_size, gates)]

    def order_rows(self) -> None:
        """Brings the rows of the loaded weight into order. Raises ModelError for rows of ggml's types."""
        if self.ggml is not None:
            raise ModelError(
                "rows of ggml's types cannot be reordered for the gates of this model's attention; use the "
                "version of the model in safetensors"
            )
        for rows in self.row_tensors():
            pairs = rows[: 2 * self.gate_size].unflatten(0, (-1, 2, self.dim))
            queries, gates = (part.flatten(0, 1).clone() for part in pairs.unbind(1))
            rows.copy_(torch.cat((queries, rows[2 * self.gate_size :].clone(), gates)))


class GatedSelfAttention(SelfAttention):
    """sigmoid(gate) * attention, before the output projection."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        super().__init__(device, dtype, config, index)
        self.qkv_proj: GatedQkvLinear = GatedQkvLinear(device, dtype, config)
        self.qkv_proj.row_order = self.row_order

    def finish_loading(self) -> None:
        """See SelfAttention.finish_loading; gates go behind the values first."""
        self.qkv_proj.order_rows()
        super().finish_loading()

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> (queries [T, H, D], gates [T, H * D]); keys and values go to the cache."""
        fused = self.qkv_proj.forward(x)
        sizes = fused.shape[1] - self.qkv_proj.gate_size, self.qkv_proj.gate_size
        qkv, gate = fused.split(sizes, dim=1)
        return self.attention.prepare(qkv.contiguous(), self.qk_norm, cos, sin, batch), gate

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Gated attention output [T, H * D], before `o_proj`."""
        q, gate = queries
        return self.attention.forward(q, batch) * gate.sigmoid()
