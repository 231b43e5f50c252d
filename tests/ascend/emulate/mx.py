"""Operators of formats whose groups of 32 numbers share an exponent of 8 bits (OCP Microscaling Formats,
2023). torch_npu has their schemas. The one that op-plugin documents (517f2e7, August 2026,
npu_dynamic_dual_level_mx_quant) is the Ascend 950's, and A2 and A3 multiply no floats of 8 or 4 bits."""

from typing import Any

from tests.ascend.emulate.table import Refused, operator

MX = (
    "npu::npu_add_rms_norm_dynamic_mx_quant",
    "npu::npu_anti_mx_quant",
    "npu::npu_dynamic_block_mx_quant",
    "npu::npu_dynamic_dual_level_mx_quant",
    "npu::npu_dynamic_mx_quant",
    "npu::npu_dynamic_mx_quant_with_dual_axis",
    "npu::npu_grouped_dynamic_mx_quant",
    "npu::npu_rms_norm_dynamic_mx_quant",
    "npu::npu_swiglu_mx_quant",
    "npu::npu_swiglu_mx_quant_with_dual_axis",
)


@operator(*MX)
def of_the_950(*_: Any, **__: Any) -> None:
    """Raises Refused."""
    raise Refused("formats with shared exponents are the Ascend 950's: A2 and A3 have no such operator")
