"""Layers that every rank has in full: small ones, for which sharding would cost more in communication than it
saves."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from runtime.devices.base import Device
from runtime.layers.weight import Layer, PackedModules, SourceTensor, Weight, replicated_shard

# modules of checkpoints -> the layer below that has them, and the part of it
REPLICATED_MODULES: PackedModules = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}


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
    """Queries, keys and values in one product: x [..., size] -> [..., size + 2 * kv_size]. `key_bias`: keys
    have a bias where queries and values do; `kv_size`: numbers of keys, and of values, None: of as many heads
    as queries."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        size: int,
        *,
        bias: bool,
        key_bias: bool = True,
        kv_size: int | None = None,
    ) -> None:
        parts = {"q": size, "k": kv_size or size, "v": kv_size or size}
        self.weight = _joined_weight(device, dtype, parts, size)
        self.bias = _joined_weight(device, dtype, parts, without="" if key_bias else "k") if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size + 2 * kv_size]: queries, keys, values."""
        return linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


class ReplicatedGateUp(Layer):
    """The gate of a feed-forward and what it is multiplied with in one product: x [..., size] -> [..., 2 *
    inner]."""

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, inner: int, *, bias: bool = True
    ) -> None:
        parts = {"gate": inner, "up": inner}
        self.weight = _joined_weight(device, dtype, parts, size)
        self.bias = _joined_weight(device, dtype, parts) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., 2 * inner]: the gate first."""
        return linear(x, self.weight.tensor, None if self.bias is None else self.bias.tensor)


def _joined_weight(
    device: Device, dtype: torch.dtype, parts: dict[str, int], *width: int, without: str = ""
) -> Weight:
    """Weights in one, one below the other: `parts` has the rows of each by its name, `width` the further
    dimensions. `without`: the part in whose place zeros are."""
    sources: dict[str, SourceTensor] = {}
    offset = 0
    for part, rows in parts.items():
        sources[part] = SourceTensor((rows, *width), 0, replicated_shard(rows), offset=offset)
        offset += rows
    weight = Weight.empty((offset, *width), sources, dtype, device.torch_device)
    if without:
        weight.target(weight.sources.pop(without)).zero_()
    return weight


class ReplicatedEmbedding(Layer):
    """A lookup table, as for positions: indices [T] -> vectors [T, size]."""

    def __init__(self, device: Device, dtype: torch.dtype, num_rows: int, size: int) -> None:
        self.weight = replicated_weight(device, dtype, num_rows, size)

    def forward(self, indices: Tensor) -> Tensor:
        """int64 [T] -> [T, size]."""
        return embedding(indices, self.weight.tensor)
