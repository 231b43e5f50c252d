"""Int8 weights times int8 activations on Ascend (W8A8): sums are int32, as devices/cpu/quantized.py defines
them."""

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.formats import in_tiles
from runtime.devices.base import Quantized
from runtime.models.quantization_schemes import Int8


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """As the product takes it: transposed, in tiles where that is possible. The last three where the scale of
    activations is settled."""

    weight: Tensor  # int8 [in, out]
    scale: Tensor  # float32 [out]
    reciprocal: Tensor | None  # float32 [1], of the activations' scale
    offset: Tensor | None  # float32 [1]
    sums: Tensor | None  # int32 [out]


def pack_int8(weight: Quantized) -> Int8Weight:
    assert isinstance(weight.scheme, Int8)
    packed = in_tiles(weight.weight.t().contiguous())
    reciprocal = None if weight.input_scale is None else 1 / weight.input_scale
    return Int8Weight(packed, weight.scale.flatten(), reciprocal, weight.input_offset, weight.sums)


def multiply(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """x [N, in] -> [N, out] in the dtype of x."""
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
