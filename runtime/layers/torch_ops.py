"""Norm and activation in plain torch, for a compiler to see through where a device has kernels of its own."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from runtime.devices.base import Gate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    numbers = x.float()
    scale = torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)
    return (numbers * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def act_and_mul(x: Tensor, kind: Gate) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return ((silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")) * up).to(x.dtype)
