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


class QuantizedInputs:
    """The latest activations that were quantized before their product, with their scales."""

    def __init__(self) -> None:
        # the activations, or their codes where these alone were made; the codes; and the scales
        self.latest: tuple[Tensor, Tensor, Tensor] | None = None

    def put(self, codes: Tensor, scales: Tensor, x: Tensor | None = None) -> Tensor:
        """Keeps codes, int8 [N, in], and their scales, float32 [N], for a product with `x`, or with the codes
        in its place. -> the codes"""
        self.latest = codes if x is None else x, codes, scales
        return codes

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, in] as int8, and scales [N]: once those that were put for this very tensor, if they were."""
        if self.latest is not None and self.latest[0] is x:
            (_, codes, scales), self.latest = self.latest, None
            return codes, scales
        assert x.dtype != torch.int8, "codes of another product"
        return torch_npu.npu_dynamic_quant(x.contiguous())


def takes_token_codes(feeds: object) -> bool:
    """Whether a product with this packed weight quantizes its inputs with a scale for each token."""
    return isinstance(feeds, Int8Weight) and feeds.reciprocal is None


def int8_matmul(
    x: Tensor, weight: Int8Weight, bias: Tensor | None, inputs: QuantizedInputs, dtype: torch.dtype
) -> Tensor:
    """Product x [N, in] -> [N, out] in `dtype`. x is of that dtype, or int8 codes of `inputs`."""
    if weight.reciprocal is None:
        codes, scales = inputs.of(x)
        out = torch_npu.npu_quant_matmul(
            codes, weight.weight, weight.scale, pertoken_scale=scales, output_dtype=dtype
        )
    else:
        codes = torch_npu.npu_quantize(
            x.contiguous(), weight.reciprocal, weight.offset, torch.qint8, -1, False
        )
        out = torch_npu.npu_quant_matmul(
            codes, weight.weight, weight.scale, bias=weight.sums, output_dtype=dtype
        )
    return out if bias is None else out + bias


def swiglu_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(first half) * second half of x [N, 2 * inner], as int8 [N, inner], and scales float32 [N]."""
    return torch_npu.npu_dequant_swiglu_quant(x, activate_left=True, quant_mode=1)
