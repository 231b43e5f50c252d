"""Root mean square normalisation."""

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.weight import Layer, Part, Share, Weight


class RMSNorm(Layer):
    """Over the last dimension of size `size`; every rank holds the whole weight."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        self.ops = device.ops
        self.eps = eps
        self.weight = Weight((size,), {"": Part((size,), 0, Share(size, 0, size))}, dtype, device.place)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight.tensor, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        return self.ops.add_rms_norm(x, residual, self.weight.tensor, self.eps)
