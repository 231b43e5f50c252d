"""Norms of queries and keys that are computed on the output of the QKV projection, before heads are split and
rotated. Norms of single heads by their root mean square are the device's (FusedOps.prepare_heads)."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from runtime.devices.base import Device
from runtime.layers.linear import QkvLinear
from runtime.layers.weight import Layer, Shard, SourceTensor, Weight


class ShardedNormWeight(Layer):
    """A norm's weight for all query or all key heads, of which a rank has those of its own heads."""

    def __init__(self, device: Device, dtype: torch.dtype, shard: Shard, shape: tuple[int, ...]) -> None:
        """`shape` in the checkpoint; `shard` is of its first dimension."""
        sources = {"": SourceTensor(shape, 0, shard)}
        self.weight = Weight.empty((shard.size, *shape[1:]), sources, dtype, device.torch_device)


class ProjectionNorms:
    """RMSNorm over all queries of a token, and over all its keys (OLMo 2, 2024). Where heads are split over
    ranks, so are the squares, whose means the ranks exchange."""

    def __init__(self, device: Device, qkv: QkvLinear, weights: tuple[Tensor, Tensor], eps: float) -> None:
        """`weights`: of this rank's queries and keys."""
        self.ranks = device.head_ranks
        self.sizes = [qkv.outputs[part].size for part in ("q", "k", "v")]
        self.counts_keys = qkv.counts_keys
        self.weights = weights
        full = [float(qkv.outputs[part].full) for part in ("q", "k")]
        self.full = torch.tensor(full, device=device.torch_device)  # queries and keys of all ranks
        self.eps = eps

    def __call__(self, qkv: Tensor) -> Tensor:
        """[T, queries + keys + values] -> the same, normalized."""
        *parts, v = qkv.split(self.sizes, dim=1)
        squares = torch.stack([part.float().square().sum(1) for part in parts], 1)
        if self.ranks.size > 1:
            if not self.counts_keys:
                squares[:, 1] = 0
            squares = self.ranks.all_reduce(squares)
        scales = torch.rsqrt(squares / self.full + self.eps).split(1, dim=1)
        normed = [
            (part.float() * scale).to(part.dtype) * weight
            for part, scale, weight in zip(parts, scales, self.weights, strict=True)
        ]
        return torch.cat((*normed, v), dim=1)


class HeadLayerNorms:
    """Each query and key head less its mean, divided by its standard deviation, times a weight of its own
    (Cohere's Command-R+, 2024)."""

    def __init__(self, heads: tuple[int, int, int], weights: tuple[Tensor, Tensor], eps: float) -> None:
        """`weights`: [H, D] of queries and [K, D] of keys."""
        self.weight = torch.cat(weights)
        self.num_values = heads[2]
        self.eps = eps

    def __call__(self, qkv: Tensor) -> Tensor:
        """[T, (H + 2 K) * D] -> the same, with queries and keys normalized."""
        dim = self.weight.shape[1]
        heads = qkv.view(len(qkv), -1, dim)
        qk, v = heads.split((heads.shape[1] - self.num_values, self.num_values), dim=1)
        normed = layer_norm(qk.float(), (dim,), eps=self.eps) * self.weight.float()
        return torch.cat((normed.to(qkv.dtype), v), dim=1).flatten(1)
