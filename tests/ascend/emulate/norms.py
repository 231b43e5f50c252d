"""Norms, rotary embeddings and activations."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ascend.emulate.table import need, need_dtype, operator

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """In fp32; rstd keeps the normalised dimensions as ones."""
    last = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = x.float().square().mean(last, keepdim=True).add(epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def check_gamma(x: Tensor, gamma: Tensor) -> None:
    need_dtype("x", x, *FLOATS)
    need(gamma.dtype in (x.dtype, torch.float32), f"gamma is {gamma.dtype}, x {x.dtype}")
    need(0 < gamma.dim() <= x.dim() and x.shape[x.dim() - gamma.dim():] == gamma.shape,
         f"gamma {tuple(gamma.shape)} is not the end of x {tuple(x.shape)}")


@operator("npu::npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    check_gamma(x, gamma)
    return normed(x, gamma, epsilon)


@operator("npu::npu_gemma_rms_norm")
def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    check_gamma(x, gamma)
    return normed(x, gamma.float() + 1, epsilon)


@operator("npu::npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    need(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 differ in shape or dtype")
    check_gamma(x1, gamma)
    total = x1 + x2
    y, rstd = normed(total, gamma, epsilon)
    return y, rstd, total


@operator("npu::npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    need_dtype("input", x, *FLOATS)
    need(x.shape[dim] % 2 == 0, f"dimension {dim} of {tuple(x.shape)} is odd")
    gate, up = x.float().chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)


def turned(x: Tensor, mode: str) -> Tensor:
    """What sin multiplies."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@operator("npu::npu_rotary_mul")
def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    need(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    need(rotate is None, "rotate is not emulated")
    need_dtype("input", x, *FLOATS)
    need(x.dim() == r1.dim() == 4, f"input and r1 are 4-D, not {x.dim()}-D and {r1.dim()}-D")
    need(r1.shape == r2.shape and r1.shape[-1] == x.shape[-1], "r1, r2: last dimension")
    need(all(small in (1, size) for small, size in zip(r1.shape, x.shape, strict=True)), "r1 and r2 must broadcast to input")
    return (x.float() * r1.float() + turned(x.float(), rotary_mode) * r2.float()).to(x.dtype)
