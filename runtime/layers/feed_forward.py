"""The dense feed-forward of a layer."""

import torch
from torch import Tensor

from runtime.devices.base import Device, Gate
from runtime.layers.linear import Linear, Sums
from runtime.layers.weight import Layer


class FeedForward(Layer):
    """SwiGLU: down(silu(gate(x)) * up(x)), or with `gelu` in place of silu GeGLU (Shazeer, 2020). With `sums`
    False each rank returns its part of the sum; with `whole` each rank has all of the weights, and its own
    tokens."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        sums: Sums = True,
        whole: bool = False,
        gelu: bool = False,
    ) -> None:
        self.ops = device.ops
        self.kind: Gate = "gelu_tanh" if gelu else "silu"
        self.gate_up_proj = Linear(
            device,
            dtype,
            hidden,
            {"gate": inner, "up": inner},
            shard="whole" if whole else "column",
            bias=bias,
        )
        self.down_proj = Linear(
            device, dtype, inner, {"": hidden}, shard="whole" if whole else "row", bias=bias, sums=sums
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.forward(self.ops.act_and_mul(self.gate_up_proj.forward(x), self.kind))
