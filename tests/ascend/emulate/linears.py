"""Quantisation and matrix products."""

from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.table import need, need_half, operator

ACL_DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 27: torch.bfloat16}
SCALAR_TYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 12: torch.qint8, 15: torch.bfloat16}


def dtype_of(number: Any, default: torch.dtype) -> torch.dtype:
    """A dtype argument: Python passes torch.dtype as its number in c10::ScalarType."""
    if number is None:
        return default
    return number if isinstance(number, torch.dtype) else SCALAR_TYPES[number]


@operator("npu::npu_dynamic_quant")
def dynamic_quant(x: Tensor, *, smooth_scales: Tensor | None = None, group_index: Tensor | None = None, dst_type: Any = None,
                  quant_mode: str | None = "pertoken", dst_type_max: float = 0.0) -> tuple[Tensor, Tensor]:
    need_half(input=x)
    need(dtype_of(dst_type, torch.int8) == torch.int8, f"dst_type {dst_type} is not emulated")
    need(group_index is None and quant_mode in (None, "pertoken"), "groups and other modes are not emulated")
    values = x.float() if smooth_scales is None else x.float() * smooth_scales.float()
    scale = values.abs().amax(-1) / 127.0
    return (values / scale.clamp_min(1e-30)[..., None]).round().clamp(-128, 127).to(torch.int8), scale


@operator("npu::npu_quant_matmul")
def quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None, pertoken_scale: Tensor | None = None,
                 bias: Tensor | None = None, output_dtype: Any = None, **rest: Any) -> Tensor:
    need(all(given is None for given in rest.values()), f"not emulated: {rest}")
    need(x1.dtype == x2.dtype == torch.int8, "x1 and x2 must be int8")
    need(x1.shape[-1] == x2.shape[-2], f"inner dimensions {tuple(x1.shape)} x {tuple(x2.shape)}")
    need(scale.numel() in (1, x2.shape[-1]), "scale must have 1 or n elements")
    need(pertoken_scale is None or pertoken_scale.shape == x1.shape[:-1], "pertoken_scale must have m elements")
    total = x1.double() @ x2.double()
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias.double()
    y = total * scale.double()
    if pertoken_scale is not None:
        y = y * pertoken_scale.double()[..., None]
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.double()
    return y.to(dtype_of(output_dtype, torch.int8))
