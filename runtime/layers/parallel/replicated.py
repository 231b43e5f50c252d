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
    """Queries, keys and values of as many heads each in one product: x [..., size] -> [..., 3 * size].
    `key_bias`: keys have a bias where queries and values do."""

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, *, bias: bool, key_bias: bool = True
    ) -> None:
        self.weight = _joined_weight(device, dtype, "q k v", size, size)
        self.bias = _joined_weight(device, dtype, "q k v", size, has_second=key_bias) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., 3 * size]: queries, keys, values."""
        return linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


class ReplicatedGateUp(Layer):
    """The gate of a feed-forward and what it is multiplied with in one product: x [..., size] ->
    [..., 2 * inner]."""

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, inner: int, *, bias: bool = True
    ) -> None:
        self.weight = _joined_weight(device, dtype, "gate up", inner, size)
        self.bias = _joined_weight(device, dtype, "gate up", inner) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., 2 * inner]: the gate first."""
        return linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


def _joined_weight(
    device: Device, dtype: torch.dtype, names: str, *shape: int, has_second: bool = True
) -> Weight:
    """Weights of one shape in one, one below the other, by their names. Without the second, zeros are in its
    place."""
    size, parts = shape[0], names.split()
    sources = {
        part: SourceTensor(shape, 0, replicated_shard(size), offset=i * size) for i, part in enumerate(parts)
    }
    weight = Weight.empty((len(parts) * size, *shape[1:]), sources, dtype, device.torch_device)
    if not has_second:
        weight.target(weight.sources.pop(parts[1])).zero_()
    return weight


class ReplicatedEmbedding(Layer):
    """A lookup table, as for positions: indices [T] -> vectors [T, size]."""

    def __init__(self, device: Device, dtype: torch.dtype, num_rows: int, size: int) -> None:
        self.weight = replicated_weight(device, dtype, num_rows, size)

    def forward(self, indices: Tensor) -> Tensor:
        """int64 [T] -> [T, size]."""
        return embedding(indices, self.weight.tensor)
