"""What each scheme computes, by definition and exactly: products and sums are float32, or integers.

    Fp8, Int8    y = x Wᵀ of activations that were quantized, each token by itself, and dequantized
    Codes        y = x Wᵀ with W = (code - zero) * scale

Weights stay in their few bits. A piece of rows at a time is turned to float32, small enough that it never
leaves the processor's cache: that costs less than reading the same weights in float32 from memory.
"""

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.base import Quantized
from runtime.layers.quantization.dequantize import dequantized
from runtime.layers.quantization.layouts import FP8_MAX
from runtime.models.config.quantization_schemes import Fp8, Int8

CACHED_COUNT = 1 << 18  # elements of a weight that are dequantized at once
TINY = 1e-12
TENSORS = tuple(field.name for field in fields(Quantized) if field.name != "scheme")


def multiply(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """x [N, in] -> [N, out] in the dtype of x."""
    scheme = weight.scheme
    if isinstance(scheme, Int8):
        out = _integers(x, weight)
    else:
        inputs = x.float()
        if scheme.activations != "none":
            inputs = rounded_fp8(inputs, weight) if isinstance(scheme, Fp8) else rounded_int8(inputs)
        out = _by_row_blocks(inputs, weight)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def rounded_fp8(x: Tensor, weight: Quantized) -> Tensor:
    """Activations quantized to float8 and back, float32 [N, in]."""
    assert isinstance(weight.scheme, Fp8)
    if weight.input_scale is not None:
        return _through_fp8(x, weight.input_scale)
    group = weight.scheme.group_size
    if not group:
        return _through_fp8(x, (x.abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=TINY))
    size = x.shape[1]
    grouped = pad(x, (0, -size % group)).unflatten(1, (-1, group))
    return _through_fp8(grouped, (grouped.abs().amax(2, keepdim=True) / FP8_MAX).clamp_(min=TINY)).flatten(1)[
        :, :size
    ]


def _through_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float().mul_(scale)


def _token_scale(x: Tensor) -> Tensor:
    return (x.abs().amax(1, keepdim=True) / 127).clamp_(min=TINY)


def rounded_int8(x: Tensor) -> Tensor:
    """Activations quantized to int8, with a scale for each row, and back, float32 [N, in]."""
    scale = _token_scale(x)
    return (x / scale).round_().mul_(scale)


def _integers(x: Tensor, weight: Quantized) -> Tensor:
    inputs, rows = x.float(), weight.weight
    if weight.input_scale is None:
        scale = _token_scale(inputs)
        sums = torch._int_mm((inputs / scale).round_().to(torch.int8), rows.T)
        return sums.float().mul_(scale).mul_(weight.scale.T)
    assert weight.input_offset is not None and weight.sums is not None
    codes = (inputs / weight.input_scale).add_(weight.input_offset).round_().clamp_(-128, 127).to(torch.int8)
    return (torch._int_mm(codes, rows.T) + weight.sums).float().mul_(weight.scale.T)


def _by_row_blocks(x: Tensor, weight: Quantized) -> Tensor:
    num_rows = len(weight.weight)
    out = x.new_empty(len(x), num_rows)
    step = max(1, CACHED_COUNT // x.shape[1])
    for at in range(0, num_rows, step):
        torch.mm(x, row_block(weight, at, at + step).T, out=out[:, at : at + step])
    return out


def row_block(weight: Quantized, begin: int, end: int) -> Tensor:
    """Rows `begin` to `end` of a weight, dequantized to float32."""
    zeros = None if weight.zeros is None else weight.zeros[begin:end]
    part = Quantized(weight.scheme, weight.weight[begin:end], weight.scale[begin:end], zeros, weight.order)
    return dequantized(part, torch.float32)


def entry(stack: Quantized, index: int) -> Quantized:
    """The weight of one expert of a stack."""
    tensors = {name: getattr(stack, name) for name in TENSORS}
    return Quantized(
        stack.scheme, **{name: None if tensor is None else tensor[index] for name, tensor in tensors.items()}
    )
