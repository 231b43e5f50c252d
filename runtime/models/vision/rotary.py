"""Rotary positions of patches whose neighbouring dimensions rotate together."""

import torch
from torch import Tensor


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, heads, D] with dimensions 2i and 2i + 1 rotated, in float32, by cosines and sines float32 [L,
    D / 2]."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def axis_angles(places: Tensor, size: int, theta: float) -> Tensor:
    """Places on an axis, int64 [L] -> angles of pairs, float32 [L, size / 2]. `size`: dimensions of a head
    that rotate with this axis; `theta`: base of the frequencies."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size
    return places.float().unsqueeze(1) * (1.0 / theta**exponents)
