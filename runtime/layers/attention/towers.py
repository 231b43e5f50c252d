"""Attention in towers of images and sounds: every position of an image or a part of it sees all of them."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.devices.base import Device

# queries, keys and values [..., heads, L, D] -> [..., heads, L, D]; the scale is 1 / sqrt(D)
TowerAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def tower_attention(device: Device) -> TowerAttention:
    """The device's own, or that of torch."""
    return device.tower_attention or scaled_dot_product_attention
