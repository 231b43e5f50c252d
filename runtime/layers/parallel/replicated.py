"""Layers that every rank has in full: small ones, for which sharding would cost more in communication than it
saves."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from runtime.devices.base import Device
from runtime.layers.weight import Layer, SourceTensor, Weight, replicated_shard


def replicated_weight(device: Device, dtype: torch.dtype, *shape: int) -> Weight:
    """A weight of this shape that every rank has in full."""
    source = SourceTensor(shape, 0, replicated_shard(shape[0]))
    return Weight.empty(shape, {"": source}, dtype, device.torch_device)


class ReplicatedLinear(Layer):
    """x [N, in] -> x Wᵀ + b [N, out]."""

    def __init__(self, device: Device, dtype: torch.dtype, inputs: int, outputs: int, *, bias: bool) -> None:
        self.weight = replicated_weight(device, dtype, outputs, inputs)
        self.bias = replicated_weight(device, dtype, outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


class ReplicatedQkv(Layer):
    """Queries, keys and values of as many heads each in one product: x [..., size] -> [..., 3 * size]."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, *, bias: bool) -> None:
        self.weight = _qkv_weight(device, dtype, size, size)
        self.bias = _qkv_weight(device, dtype, size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., 3 * size]: queries, keys, values."""
        return linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


def _qkv_weight(device: Device, dtype: torch.dtype, *shape: int) -> Weight:
    size = shape[0]
    sources = {
        part: SourceTensor(shape, 0, replicated_shard(size), offset=i * size) for i, part in enumerate("qkv")
    }
    return Weight.empty((3 * size, *shape[1:]), sources, dtype, device.torch_device)


class ReplicatedEmbedding(Layer):
    """A lookup table, as for positions: indices [T] -> vectors [T, size]."""

    def __init__(self, device: Device, dtype: torch.dtype, num_rows: int, size: int) -> None:
        self.weight = replicated_weight(device, dtype, num_rows, size)

    def forward(self, indices: Tensor) -> Tensor:
        """int64 [T] -> [T, size]."""
        return embedding(indices, self.weight.tensor)
