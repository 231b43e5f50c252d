"""Images cut into patches."""

from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.weight import Layer


def join_squares(x: Tensor, merge: int) -> Tensor:
    """As `join_grid`, of patches of square images."""
    side = isqrt(x.shape[1])
    return join_grid(x, side, side, merge)


def join_grid(x: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """Patches in rows and columns, row by row, [B, patches, size] -> squares of `merge` rows and columns of
    them as one vector each, [B, patches / merge^2, size * merge^2]."""
    count, high, wide = len(x), rows // merge, columns // merge
    squares = x.reshape(count, high, merge, wide, merge, -1).permute(0, 1, 3, 2, 4, 5)
    return squares.reshape(count, high * wide, -1)


def nearest(shares: Tensor, side: int) -> Tensor:
    """Entries of a table of `side` for places on an axis of length 1, float32 [L] -> int64 [L]."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)


class PatchProjection(Layer):
    """Square patches of images as vectors: a convolution whose kernels do not overlap, as one product for
    each patch."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, patch: int, *, bias: bool) -> None:
        self.patch = patch
        self.weight = replicated_weight(device, dtype, size, 3, patch, patch)
        self.bias = replicated_weight(device, dtype, size) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, height, width] -> [B, patches, size], row by row. What is less than a patch at the right and
        at the bottom is left out."""
        count, patch = len(pixels), self.patch
        rows, columns = pixels.shape[2] // patch, pixels.shape[3] // patch
        used = pixels[:, :, : rows * patch, : columns * patch]
        patches = used.reshape(count, 3, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
        bias = None if self.bias is None else self.bias.tensor
        return linear(patches.reshape(count, rows * columns, -1), self.weight.tensor.flatten(1), bias)
