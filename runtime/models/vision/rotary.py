"""Rotary positions of patches by row and column."""

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, heads, D] with dimensions i and i + D / 2 rotated, in float32. cos, sin: [L, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
