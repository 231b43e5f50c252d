"""The delta rule of Kimi Linear ("Kimi Linear: An Expressive, Efficient Attention Architecture", 2025), with
a decay for each channel of a key (delta_rule.py), behind a causal convolution."""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.linear import Linear, Reduction
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.recurrent.delta_rule import delta_rule, unit
from runtime.layers.recurrent.parts import parts_weight
from runtime.layers.recurrent.recurrence import state_rows
from runtime.layers.recurrent.short_conv import CausalConv
from runtime.layers.weight import Layer, replicated_shard, scaled_shard, unit_shard
from runtime.models.config.recurrent_config import KimiDelta


class SigmoidHeadNorm(Layer):
    """RMSNorm of each head, times sigmoid(gate), in float32."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        self.weight = replicated_weight(device, dtype, size)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """float32 x [T, H, K] and gate [T, H, K] -> [T, H, K] in the dtype of `gate`."""
        normed = x * (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return (normed * self.weight.tensor.float() * gate.float().sigmoid()).to(gate.dtype)


class KimiDeltaMixer(Layer):
    """Projections, convolution, delta rule and gated norm. Heads are split over the ranks; what decays and
    gates are made of is small, and every rank has all of it."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        config: KimiDelta,
        place: int,
        reduction: Reduction,
    ) -> None:
        """`place`: of the layer among the recurrent ones."""
        self.place, self.dim, self.device = place, config.head_dim, device
        heads = unit_shard(config.num_heads, device.collectives, "heads of recurrent layers")
        inner, low = scaled_shard(heads, self.dim), replicated_shard(self.dim)
        self.in_proj_qkv = Linear(
            device, dtype, hidden, dict.fromkeys(("q", "k", "v"), inner), shard="column"
        )
        self.low_proj = Linear(device, dtype, hidden, {"f": low, "g": low, "b": heads}, shard="column")
        self.low_sizes = (self.dim, self.dim, heads.size)
        self.f_b_proj, self.g_b_proj = (
            Linear(device, dtype, self.dim, {"": inner}, shard="column") for _ in range(2)
        )
        self.conv1d = CausalConv(device, dtype, [inner] * 3, config.kernel, bias=False, names=("q", "k", "v"))
        self.dt_bias = parts_weight(device, torch.float32, [inner])
        self.A_log = parts_weight(device, torch.float32, [heads], is_flat=True)
        self.gated_norm = SigmoidHeadNorm(device, dtype, self.dim, config.eps)
        self.out_proj = Linear(device, dtype, inner, {"": hidden}, shard="row", reduction=reduction)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, hidden] -> queries, keys and values of all heads before the convolution, decays before their
        function, gates [T, H * K], and rates before theirs [T, H]."""
        low_decay, low_gate, rate = self.low_proj.forward(x).split(self.low_sizes, dim=1)
        decay = self.f_b_proj.forward(low_decay.contiguous())
        return self.in_proj_qkv.forward(x), decay, self.g_b_proj.forward(low_gate.contiguous()), rate

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """See TokenMixer; the states of the step's sequences move on."""
        (mixed, decay, gate, rate), rows, dim = queries, state_rows(batch), self.dim
        conv_state, state = rows.tensors[self.place]
        channels = silu(self.conv1d.forward(mixed, conv_state, rows)).float()
        q, k, v = (part.unflatten(1, (-1, dim)) for part in channels.chunk(3, dim=1))
        wide = decay.float() + self.dt_bias.tensor
        g = -self.A_log.tensor.exp().unsqueeze(1) * softplus(wide.unflatten(1, (-1, dim)))
        parts = unit(q) * dim**-0.5, unit(k), v, g, rate.float().sigmoid()
        out = delta_rule(self.device.state_steps).run(parts, state, rows)
        return self.gated_norm.forward(out, gate.unflatten(1, (-1, dim))).flatten(1)
