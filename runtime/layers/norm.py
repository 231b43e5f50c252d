"""Root mean square normalization."""

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.weight import Layer, SourceTensor, TensorReader, Weight, replicated_shard


class RMSNorm(Layer):
    """RMSNorm over the last dimension, of size `size`. Every rank has the whole weight.

    Quantization tools may move outliers out of the weights behind a norm; their checkpoints have a bias for
    the norm, unless `may_have_bias` is False.
    """

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, eps: float, *, may_have_bias: bool = True
    ) -> None:
        self.ops = device.ops
        self.eps = eps
        self.weight = Weight.empty(
            (size,), {"": SourceTensor((size,), 0, replicated_shard(size))}, dtype, device.torch_device
        )
        self.shift: Tensor | None = None  # the bias, where the checkpoint has one
        source = SourceTensor((size,), 0, replicated_shard(size), load=self._load_bias)
        self.bias = Weight(torch.empty(0), {"": source}, is_optional=True) if may_have_bias else None

    def _load_bias(self, reader: TensorReader) -> None:
        self.shift = torch.empty_like(self.weight.tensor).copy_(reader[...])

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        normed = self.ops.rms_norm(x, self.weight.tensor, self.eps)
        return normed if self.shift is None else normed + self.shift

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        normed, total = self.ops.add_rms_norm(x, residual, self.weight.tensor, self.eps)
        return (normed if self.shift is None else normed + self.shift), total


class UnitOffsetRMSNorm(RMSNorm):
    """RMSNorm for checkpoints that store weight - 1. The weight is float32: the sum in fewer bits would lose
    the difference from 1."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        super().__init__(device, torch.float32, size, eps, may_have_bias=False)

    def finish_loading(self) -> None:
        """Adds the 1."""
        self.weight.tensor += 1
