"""The mixer of Mamba (Gu and Dao, "Linear-Time Sequence Modeling with Selective State Spaces", 2023).

Each channel has a state [N]. A token with input x, time step d and vectors B, C [N], which all channels
share, changes it and reads it:

    state = exp(d * A) * state + d * x * B,    y = C · state + D x

Decays differ from channel to channel and from place to place in the state. So a chunk of tokens has no form
as masked products, and is computed token by token.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.linear import Linear, Reduction
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.recurrent.parts import PartsLinear, parts_weight
from runtime.layers.recurrent.recurrence import Recurrence, in_segments, state_rows
from runtime.layers.recurrent.short_conv import CausalConv
from runtime.layers.weight import Layer, channel_shard
from runtime.models.config.recurrent_config import Mamba1

SEGMENT = 64  # tokens whose decays are in memory at a time


def scan_step(a: Tensor, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences: a [C, N], x and step [R, C], b and c [R, N], state [R, C, N] -> y
    [R, C] and the new state. All float32."""
    x, step, b, c = inputs
    state = state * (step.unsqueeze(2) * a).exp() + (x * step).unsqueeze(2) * b.unsqueeze(1)
    return (state @ c.unsqueeze(2)).squeeze(2), state


def scan_tokens(a: Tensor, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence: a [C, N], x and step [T, C], b and c [T, N], state [C, N] -> y [T, C] and the
    new state. All float32."""
    return in_segments(partial(_scan_segment, a), inputs, state, SEGMENT)


def _scan_segment(a: Tensor, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    x, step, b, c = inputs
    decays = (step.unsqueeze(2) * a).exp()
    states = (x * step).unsqueeze(2) * b.unsqueeze(1)  # what each token adds, at first
    for decay, added in zip(decays, states, strict=True):
        state = added.addcmul_(decay, state)
    return (states @ c.unsqueeze(2)).squeeze(2), state


class StateNorm(Layer):
    """RMSNorm of time steps, B or C. Every rank has the whole weight, if there is one."""

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, eps: float, *, has_weight: bool
    ) -> None:
        self.eps = eps
        self.weight = replicated_weight(device, dtype, size) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        wide = x.float()
        normed = (wide * (wide.square().mean(dim=1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)
        return normed if self.weight is None else normed * self.weight.tensor


class Mamba1Mixer(Layer):
    """Projections, convolution and scan. Channels are split over the ranks; time steps, B and C are sums over
    all channels."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        config: Mamba1,
        place: int,
        reduction: Reduction,
    ) -> None:
        """`place`: of the layer among the recurrent ones."""
        self.config, self.place = config, place
        own = channel_shard(config.inner, device.collectives, "channels of recurrent layers")
        self.in_proj = PartsLinear(device, dtype, hidden, [own, own], bias=config.has_bias)
        self.conv1d = CausalConv(device, dtype, [own], config.kernel, bias=config.has_conv_bias)
        self.x_proj = Linear(device, dtype, own, {"": config.projected}, shard="row")
        self.sizes = (config.step_rank, config.state_dim, config.state_dim)
        self.dt_layernorm = self.b_layernorm = self.c_layernorm = None
        if config.norm != "none":
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
                StateNorm(device, dtype, size, config.eps, has_weight=config.norm == "weighted")
                for size in self.sizes
            )
        self.dt_proj = Linear(device, dtype, config.step_rank, {"": own}, shard="column")
        self.dt_bias = parts_weight(device, torch.float32, [own])
        self.A_log = parts_weight(device, torch.float32, [own], config.state_dim)
        self.D = parts_weight(device, torch.float32, [own])
        self.out_proj = Linear(
            device, dtype, own, {"": hidden}, shard="row", bias=config.has_bias, reduction=reduction
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, hidden] -> channels before the convolution and gates, [T, C] each."""
        return self.in_proj.split(x)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """See TokenMixer; the states of the step's sequences move on."""
        (inner, gate), rows = queries, state_rows(batch)
        conv_state, state = rows.tensors[self.place]
        inner = silu(self.conv1d.forward(inner, conv_state, rows))
        step, b, c = self._steps(inner)
        a, wide = -self.A_log.tensor.exp(), inner.float()
        recurrence = Recurrence(partial(scan_step, a), partial(scan_tokens, a), rates=(1,))
        out = recurrence.run((wide, step, b, c), state, rows) + wide * self.D.tensor
        return (out * silu(gate.float())).to(inner.dtype)

    def _steps(self, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels [T, C] -> time steps [T, C], B and C [T, N], all float32."""
        step, b, c = self.x_proj.forward(inner).split(self.sizes, dim=1)
        if self.dt_layernorm is not None and self.b_layernorm is not None and self.c_layernorm is not None:
            step, b, c = (
                self.dt_layernorm.forward(step),
                self.b_layernorm.forward(b),
                self.c_layernorm.forward(c),
            )
        wide = self.dt_proj.forward(step.contiguous()).float() + self.dt_bias.tensor
        return softplus(wide), b.float(), c.float()
