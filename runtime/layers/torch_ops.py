"""Norms and activations in plain torch, which a compiler can fuse with their neighbours (torch.compile), for
devices that have kernels of their own."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from runtime.devices.base import Gate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Ops.rms_norm."""
    numbers = x.float()
    scale = torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)
    return (numbers * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See Ops.add_rms_norm."""
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def act_and_mul(x: Tensor, activation: Gate) -> Tensor:
    """See Ops.act_and_mul."""
    gate, up = x.float().chunk(2, dim=-1)
    return ((silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up).to(x.dtype)
