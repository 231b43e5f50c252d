"""Norms, rotary embeddings and activations."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ascend.emulate.table import (
    need,
    need_contiguous,
    need_dtype,
    need_half,
    need_strictly,
    need_unused,
    operator,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def quantised_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 with a scale for each row: the largest absolute value is 127."""
    scale = values.abs().amax(-1) / 127.0
    codes = (values / scale.clamp_min(1e-30)[..., None]).round().clamp(-128, 127)
    return codes.to(torch.int8), scale


def normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """In fp32; rstd keeps the normalised dimensions as ones."""
    last = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = x.float().square().mean(last, keepdim=True).add(epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def check_gamma(x: Tensor, gamma: Tensor) -> None:
    """Limits of the weight of a norm."""
    need_dtype("x", x, *FLOATS)
    need(gamma.dtype in (x.dtype, torch.float32), f"gamma is {gamma.dtype}, x {x.dtype}")
    need(x.numel() > 0, "empty tensors are not supported")
    need(
        0 < gamma.dim() <= x.dim() and x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        f"gamma {tuple(gamma.shape)} is not the end of x {tuple(x.shape)}",
    )


@operator("npu::npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """npu_rms_norm."""
    check_gamma(x, gamma)
    return normed(x, gamma, epsilon)


@operator("npu::npu_gemma_rms_norm")
def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """npu_gemma_rms_norm."""
    check_gamma(x, gamma)
    return normed(x, gamma.float() + 1, epsilon)


@operator("npu::npu_add_rms_norm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_add_rms_norm."""
    need(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 differ in shape or dtype")
    check_gamma(x1, gamma)
    total = x1 + x2
    y, rstd = normed(total, gamma, epsilon)
    return y, rstd, total


@operator("npu::npu_add_rms_norm_cast")
def add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """npu_add_rms_norm, its result as float32 as well (CANN: float of the rounded result)."""
    need(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 differ in shape or dtype")
    need_half(x1=x1)
    check_gamma(x1, gamma)
    need(gamma.dtype == x1.dtype, f"gamma is {gamma.dtype}, x1 {x1.dtype}")
    total = x1 + x2
    y, rstd = normed(total, gamma, epsilon)
    return y.float(), y, rstd, total


@operator("npu::npu_add_rms_norm_dynamic_quant")
def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """npu_add_rms_norm, its result as int8 with a scale for each row. Limits: op-plugin's document
    (517f2e7)."""
    need(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 differ in shape or dtype")
    need_half(x1=x1)
    need(2 <= x1.dim() <= 8, f"x1 has {x1.dim()} dimensions: 2 to 8")
    need(gamma.dtype == x1.dtype and gamma.dim() == 1, f"gamma is {gamma.dtype}, x1 {x1.dtype}; it is 1-D")
    check_gamma(x1, gamma)
    need_unused(smooth_scale1=smooth_scale1, smooth_scale2=smooth_scale2, beta=beta, y_dtype=y_dtype)
    need(list(output_mask or []) == [True, False], "emulated: output_mask [True, False]")
    total = x1 + x2
    rstd = total.float().square().mean(-1, keepdim=True).add(epsilon).rsqrt()
    codes, scale = quantised_rows(total.float() * rstd * gamma.float())
    return codes, torch.empty(0, dtype=torch.int8), total, scale, torch.empty(0)


@operator("npu::npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """npu_swiglu."""
    need_dtype("input", x, *FLOATS)
    need(x.shape[dim] % 2 == 0, f"dimension {dim} of {tuple(x.shape)} is odd")
    gate, up = x.float().chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)


@operator("npu::npu_clipped_swiglu")
def clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """The gate of gpt-oss, along the last dimension. Limits: op-plugin's document (26.0.0)."""
    need(group_index is None and dim in (-1, x.dim() - 1), "emulated: all rows, the last dimension")
    need_dtype("x", x, *FLOATS)
    need_contiguous(x=x)
    need(x.dim() > 1 and x.shape[-1] % 2 == 0, f"x {tuple(x.shape)}: 2-D or more, the last dimension even")
    need(limit > 0, f"limit {limit}")
    wide = x.float()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * (alpha * gate).sigmoid() * (up + bias)).to(x.dtype)


def turned(x: Tensor, mode: str) -> Tensor:
    """The factor of sin."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@operator("npu::npu_rotary_mul")
def rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """npu_rotary_mul."""
    need(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    need(rotate is None, "rotate is not emulated")
    need_dtype("input", x, *FLOATS)
    need(x.dim() == r1.dim() == 4, f"input and r1 are 4-D, not {x.dim()}-D and {r1.dim()}-D")
    need(r1.shape == r2.shape and r1.shape[-1] == x.shape[-1], "r1, r2: last dimension")
    need(
        all(small in (1, size) for small, size in zip(r1.shape, x.shape, strict=True)),
        "r1 and r2 must broadcast to input",
    )
    need(x.shape[-1] % 2 == 0 and x.shape[-1] < 896, f"head size {x.shape[-1]}: even, below 896")
    return (x.float() * r1.float() + turned(x.float(), rotary_mode) * r2.float()).to(x.dtype)


@operator("npu::npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Turns query and key in place, and returns them."""
    rank = {"BSND": 4, "TND": 3}.get(layout)
    need(rank is not None, f"layout {layout!r}: BSND or TND on A2 and A3")
    need(rotary_mode == "half", f"rotary_mode {rotary_mode!r}: half on A2 and A3")
    need(all(x.dim() == rank for x in (query, key, cos, sin)), f"layout {layout}: all tensors are {rank}-D")
    need(query.dtype == key.dtype == cos.dtype == sin.dtype, "query, key, cos and sin differ in dtype")
    need_dtype("query", query, *FLOATS)
    need(all(x.numel() > 0 for x in (query, key, cos, sin)), "empty tensors are not supported")
    need(
        query.shape[:-2] == key.shape[:-2] == cos.shape[:-2] == sin.shape[:-2],
        "query, key, cos and sin differ before the heads",
    )
    need(
        query.shape[-1] == key.shape[-1] and cos.shape == sin.shape,
        "query and key, cos and sin differ in size",
    )
    need(cos.shape[-2] == 1, "cos and sin have one head")
    need(cos.shape[-1] == query.shape[-1], "cos and sin cover the whole head")
    need_strictly(query.shape[-1] in (64, 128), f"head size {query.shape[-1]}: 64 or 128")
    for x in (query, key):
        x.copy_((x.float() * cos.float() + turned(x.float(), "half") * sin.float()).to(x.dtype))
    return query, key


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Even elements first, then odd ones, then turned by halves."""
    ordered = torch.cat((x[..., ::2], x[..., 1::2]), -1).float()
    return (ordered * cos.float() + turned(ordered, "half") * sin.float()).to(x.dtype)


@operator("npu::npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """npu_interleave_rope."""
    need(x.dim() == cos.dim() == sin.dim() == 4, "x, cos and sin are (batch, heads, tokens, 64)")
    need_half(x=x)
    need(
        x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape,
        "cos and sin have the dtype of x and one shape",
    )
    need_contiguous(x=x, cos=cos, sin=sin)
    need(
        cos.shape[1] == 1 and cos.shape[0] == x.shape[0] and cos.shape[2] in (1, x.shape[2]),
        "cos and sin: (batch, 1, tokens or 1, 64)",
    )
    need(x.shape[-1] == cos.shape[-1], "cos and sin have the last dimension of x")
    need_strictly(x.shape[-1] == 64, f"last dimension {x.shape[-1]}: 64")
    return interleaved(x, cos, sin)
