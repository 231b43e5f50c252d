"""Products of int8 weights and int8 activations on Ascend (W8A8), with int32 sums as in
devices/cpu/quantized.py."""

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.formats import to_nz
from runtime.devices.base import Quantized
from runtime.models.config.quantization_schemes import Int8


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight as the product takes it: transposed, in FRACTAL_NZ where possible. The last three fields are
    for activations with a static scale."""

    weight: Tensor  # int8 [in, out]
    scale: Tensor  # float32 [out]
    reciprocal: Tensor | None  # float32 [1]: 1 / scale of the activations
    offset: Tensor | None  # float32 [1]
    sums: Tensor | None  # int32 [out]


def pack_int8(weight: Quantized) -> Int8Weight:
    """An int8 weight [out, in] in that form."""
    assert isinstance(weight.scheme, Int8)
    packed = to_nz(weight.weight.t().contiguous())
    reciprocal = None if weight.input_scale is None else 1 / weight.input_scale
    return Int8Weight(packed, weight.scale.flatten(), reciprocal, weight.input_offset, weight.sums)


def int8_matmul(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Product x [N, in] -> [N, out] in the dtype of x."""
    x = x.contiguous()
    if weight.reciprocal is None:
        codes, scales = torch_npu.npu_dynamic_quant(x)
        out = torch_npu.npu_quant_matmul(
            codes, weight.weight, weight.scale, pertoken_scale=scales, output_dtype=x.dtype
        )
    else:
        codes = torch_npu.npu_quantize(x, weight.reciprocal, weight.offset, torch.qint8, -1, False)
        out = torch_npu.npu_quant_matmul(
            codes, weight.weight, weight.scale, bias=weight.sums, output_dtype=x.dtype
        )
    return out if bias is None else out + bias
