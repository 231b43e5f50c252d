"""Feed-forwards of encoders."""

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import ReplicatedGateUp, ReplicatedLinear
from runtime.layers.weight import Layer
from runtime.models.vision.activations import activate


class PlainMlp(Layer):
    """Two linear layers with an activation between them."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, inner: int, activation: str) -> None:
        self.activation = activation
        self.fc1 = ReplicatedLinear(device, dtype, size, inner, bias=True)
        self.fc2 = ReplicatedLinear(device, dtype, inner, size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        return self.fc2.forward(activate(self.activation, self.fc1.forward(x)))


class GatedMlp(Layer):
    """Two linear layers side by side, of which one gates the other, and one behind them."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, inner: int, activation: str) -> None:
        self.activation = activation
        self.gate_up_proj = ReplicatedGateUp(device, dtype, size, inner, bias=False)
        self.down_proj = ReplicatedLinear(device, dtype, inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        gate, up = self.gate_up_proj.forward(x).chunk(2, dim=-1)
        return self.down_proj.forward(activate(self.activation, gate) * up)
