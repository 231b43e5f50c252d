"""Images cut into patches."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.weight import Layer


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
