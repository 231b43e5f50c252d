"""The dense feed-forward of a layer."""

import torch
from torch import Tensor

from runtime.devices.base import Device, Gate
from runtime.layers.linear import Linear, Reduction
from runtime.layers.weight import Layer


class FeedForward(Layer):
    """SwiGLU: down(silu(gate(x)) * up(x)), or with `gelu` in place of silu GeGLU (Shazeer, 2020).

    `reduction`: see Linear; with "none" each rank returns its partial sum. With `replicated` each rank has
    all of the weights, and only its own tokens pass it.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        reduction: Reduction = "all_reduce",
        replicated: bool = False,
        gelu: bool = False,
    ) -> None:
        self.ops = device.ops
        self.activation: Gate = "gelu_tanh" if gelu else "silu"
        self.gate_up_proj = Linear(
            device,
            dtype,
            hidden,
            {"gate": inner, "up": inner},
            shard="replicated" if replicated else "column",
            bias=bias,
        )
        self.down_proj = Linear(
            device,
            dtype,
            inner,
            {"": hidden},
            shard="replicated" if replicated else "row",
            bias=bias,
            reduction=reduction,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj.forward(self.ops.act_and_mul(self.gate_up_proj.forward(x), self.activation))
