"""Root mean square normalisation."""

from typing import Any

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.weight import Layer, Part, Share, Weight


class RMSNorm(Layer):
    """Over the last dimension of size `size`; every rank holds the whole weight.

    Tools that quantise may move outliers out of the weights behind a norm, and then checkpoints have a bias
    for it.
    """

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, eps: float, *, may_shift: bool = True
    ) -> None:
        self.ops = device.ops
        self.eps = eps
        self.weight = Weight(
            (size,), {"": Part((size,), 0, Share(size, 0, size))}, dtype, device.torch_device
        )
        self.shift: Tensor | None = None
        part = Part((size,), 0, Share(size, 0, size), load=self._shift)
        self.bias = Weight.of(torch.empty(0), {"": part}, is_optional=True) if may_shift else None

    def _shift(self, raw: Any) -> None:
        self.shift = torch.empty_like(self.weight.tensor).copy_(raw[...])

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ops.rms_norm(x, self.weight.tensor, self.eps)
        return normed if self.shift is None else normed + self.shift

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        normed, total = self.ops.add_rms_norm(x, residual, self.weight.tensor, self.eps)
        return (normed if self.shift is None else normed + self.shift), total


class UnitNorm(RMSNorm):
    """The same where checkpoints hold how much weights differ from 1. They are float32: in fewer bits the sum
    would lose what differs."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        super().__init__(device, torch.float32, size, eps, may_shift=False)

    def finish(self) -> None:
        self.weight.tensor += 1
