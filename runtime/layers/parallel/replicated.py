"""Layers that every rank holds whole: small ones, of which parts would cost more in exchange than they
save."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, linear

from runtime.devices.base import Device
from runtime.layers.weight import Layer, Part, Share, Weight


def whole_weight(device: Device, dtype: torch.dtype, *shape: int) -> Weight:
    return Weight(shape, {"": Part(shape, 0, Share(shape[0], 0, shape[0]))}, dtype, device.torch_device)


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension (Ba et al., 2016)."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = whole_weight(device, dtype, size)
        self.bias = whole_weight(device, dtype, size)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weight.tensor, self.bias.tensor, self.eps)


class Dense(Layer):
    """x [N, in] -> x Wᵀ + b [N, out]."""

    def __init__(self, device: Device, dtype: torch.dtype, inputs: int, outputs: int, *, bias: bool) -> None:
        self.weight = whole_weight(device, dtype, outputs, inputs)
        self.bias = whole_weight(device, dtype, outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


class Table(Layer):
    """Indices [T] -> vectors [T, size]."""

    def __init__(self, device: Device, dtype: torch.dtype, num_rows: int, size: int) -> None:
        self.weight = whole_weight(device, dtype, num_rows, size)

    def forward(self, indices: Tensor) -> Tensor:
        return embedding(indices, self.weight.tensor)
