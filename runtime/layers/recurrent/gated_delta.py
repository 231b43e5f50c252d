"""Gated delta nets (Yang et al., "Gated Delta Networks", 2024): a delta rule with one decay for each head
(delta_rule.py) behind a causal convolution."""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.recurrent import RecurrentKernel, RecurrentSpec
from runtime.layers.linear import Linear, Reduction
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.recurrent.delta_rule import delta_rule, unit
from runtime.layers.recurrent.parts import PartsLinear, parts_weight
from runtime.layers.recurrent.recurrence import state_rows
from runtime.layers.recurrent.short_conv import CausalConv
from runtime.layers.weight import Layer, Shard, scaled_shard, unit_shard
from runtime.models.config.recurrent_config import GatedDelta


class GatedHeadNorm(Layer):
    """RMSNorm of each head, times silu(gate)."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        self.weight = replicated_weight(device, dtype, size)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """float32 x [T, H, V] and gate [T, H, V] -> [T, H, V] in the dtype of `gate`."""
        normed = x * (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        normed = self.weight.tensor * normed.to(gate.dtype)
        return (normed.float() * silu(gate.float())).to(gate.dtype)


class GatedDeltaMixer(Layer):
    """Projections, convolution, delta rule and gated norm. Key heads are split over the ranks, and their
    value heads with them."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        config: GatedDelta,
        place: int,
        reduction: Reduction,
    ) -> None:
        """`place`: of the layer among the recurrent ones."""
        self.config, self.place, self.device = config, place, device
        self.kernel: RecurrentKernel | None = None  # None: torch computes
        self.shared = config.value_heads // config.key_heads  # value heads of a key head
        keys = unit_shard(config.key_heads, device.collectives, "key heads of recurrent layers")
        heads = scaled_shard(keys, self.shared)
        key_part, value_part = scaled_shard(keys, config.key_dim), scaled_shard(heads, config.value_dim)
        self.sizes = [key_part.size, key_part.size, value_part.size]
        parts = [key_part, key_part, value_part]
        names = ("q", "k", "v") if config.layout == "apart" else ()
        self.conv1d = CausalConv(device, dtype, parts, config.kernel, bias=False, names=names)
        self._open_projections(device, dtype, hidden, (keys, heads), parts)
        self.dt_bias, self.A_log = (parts_weight(device, torch.float32, [heads]) for _ in range(2))
        self.gated_norm = GatedHeadNorm(device, dtype, config.value_dim, config.eps)
        self.out_proj = Linear(device, dtype, value_part, {"": hidden}, shard="row", reduction=reduction)

    def finish_loading(self) -> None:
        """See Layer.finish_loading."""
        if self.device.recurrent is not None and self.config.max_rate == 1.0:
            self.kernel = self.device.recurrent.open(
                RecurrentSpec(
                    "delta",
                    self.sizes[0] // self.config.key_dim,
                    self.sizes[2] // self.config.value_dim,
                    self.config.key_dim,
                    self.config.value_dim,
                    self.conv1d.weight.tensor,
                    step_bias=self.dt_bias.tensor,
                    log_decay=self.A_log.tensor,
                    norm="before_gate",
                    norm_weight=self.gated_norm.weight.tensor,
                    norm_size=self.config.value_dim,
                    eps=self.config.eps,
                )
            )

    def _open_projections(
        self, device: Device, dtype: torch.dtype, hidden: int, heads: tuple[Shard, Shard], parts: list[Shard]
    ) -> None:
        """`heads`: of keys and of values; `parts`: channels of queries, keys and values."""

        def column(outputs: dict[str, int | Shard]) -> Linear:
            return Linear(device, dtype, hidden, outputs, shard="column")

        config, (keys, values) = self.config, heads
        if config.layout == "by_head":
            each = 2 * config.key_dim + 2 * self.shared * config.value_dim
            self.in_proj_qkvz = column({"": scaled_shard(keys, each)})
            self.in_proj_ba = column({"": scaled_shard(keys, 2 * self.shared)})
            return
        self.in_proj_qkv = (
            PartsLinear(device, dtype, hidden, parts, bias=False)
            if config.layout == "qkv"
            else column(dict(zip(("q", "k", "v"), parts, strict=True)))
        )
        self.in_proj_z = column({"": parts[2]})
        self.in_proj_ba = column({"b": values, "a": values})

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, hidden] -> queries, keys and values of all heads [T, ...], gates [T, ...], and before their
        functions rates and time steps [T, H]."""
        config = self.config
        if config.layout != "by_head":
            rate, step = self.in_proj_ba.forward(x).chunk(2, dim=1)
            return self.in_proj_qkv.forward(x), self.in_proj_z.forward(x), rate, step
        each = self.shared * config.value_dim
        fused = self.in_proj_qkvz.forward(x).unflatten(1, (-1, 2 * config.key_dim + 2 * each))
        *qkv, gate = fused.split([config.key_dim, config.key_dim, each, each], dim=2)
        rate, step = self.in_proj_ba.forward(x).unflatten(1, (-1, 2, self.shared)).unbind(2)
        return torch.cat([part.flatten(1) for part in qkv], dim=1), gate, rate.flatten(1), step.flatten(1)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """See TokenMixer; the states of the step's sequences move on."""
        (mixed, gate, rate, step), config, rows = queries, self.config, state_rows(batch)
        conv_state, state = rows.tensors[self.place]
        if self.kernel is not None:
            gates = gate.reshape(len(mixed), -1)
            return self.kernel.forward(mixed, gates, rate, step, (conv_state, state), rows)
        q, k, v = silu(self.conv1d.forward(mixed, conv_state, rows)).float().split(self.sizes, dim=1)
        q, k = (self._spread(unit(part.unflatten(1, (-1, config.key_dim)))) for part in (q, k))
        q = q * config.key_dim**-0.5
        v = v.unflatten(1, (-1, config.value_dim))
        rate = rate.float().sigmoid() * config.max_rate
        g = -self.A_log.tensor.exp() * softplus(step.float() + self.dt_bias.tensor)
        out = delta_rule(self.device.state_steps).run((q, k, v, g.unsqueeze(2), rate), state, rows)
        gate = gate.reshape(len(mixed), -1, config.value_dim)
        return self.gated_norm.forward(out, gate).flatten(1)

    def _spread(self, x: Tensor) -> Tensor:
        """[T, key heads, K] -> [T, value heads, K]."""
        return x.unsqueeze(2).expand(-1, -1, self.shared, -1).flatten(1, 2)
