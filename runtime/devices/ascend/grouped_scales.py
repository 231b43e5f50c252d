"""Weights of 4 and 8 bits with scales by group (W4A16, W8A16, W4A8) on Ascend: the operators dequantize them
on their way to the matrix unit.

The operators limit what can be packed: groups are multiples of 32 inputs, all of one size; outputs of 4 bits
come in words of eight; in experts, 8-bit weights have one scale for each output. A weight whose checkpoint
orders inputs by group (desc_act) is sorted, and activations are reordered to match.

With int8 activations (W4A8) the activations are rounded to int8 and back, which gives the scheme's numbers.
Experts with a scale for each output have a product of their own (grouped_gemm.py).
"""

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.errors import ModelError
from runtime.layers.quantization.dequantize import unpack_codes
from runtime.models.config.quantization_schemes import PackedInt

GROUP, WORD = 32, 8  # inputs of a group are a multiple of GROUP; 4-bit codes in an int32


@dataclass(frozen=True, slots=True)
class GroupQuantWeight:
    """A weight, or a stack of weights: (weight + offset) * scale."""

    weight: Tensor  # int32 [..., in, out / 8] or int8 [..., in, out]
    scale: Tensor  # [..., groups, out], or [..., out], in the dtype of activations
    offset: Tensor | None  # like scale
    group: int  # inputs that share a scale; 0: all
    order: Tensor | None  # int64 [in]: the input of each row of the weight
    quantizes_inputs: bool  # activations are rounded to int8 and back


def pack_group_quant(weight: Quantized, dtype: torch.dtype) -> GroupQuantWeight:
    """The weight in the form that the operators take. Raises ModelError for what they do not support."""
    scheme = weight.scheme
    assert isinstance(scheme, PackedInt)
    numbers = unpack_codes(weight.weight, scheme.bits)
    ins, has_lead = numbers.shape[-1], numbers.dim() == 3
    group = scheme.group_size if weight.scale.shape[-1] > 1 else 0
    order = None if weight.order is None or not group else _sorted(weight.order, group, ins)
    _check(scheme, group, numbers.shape[-2], ins, is_stack=has_lead)
    if order is not None:
        numbers = numbers.index_select(-1, order)
    middle = 2 ** (scheme.bits - 1)
    scale, offset = _columns(weight.scale, group).to(dtype), None
    if weight.zeros is not None:
        offset = (middle - _columns(weight.zeros, group).float()).to(dtype)
    centred = (numbers.transpose(-1, -2).to(torch.int32) - middle).contiguous()  # [..., in, out]
    packed = centred.to(torch.int8)
    if scheme.bits == 4:
        lines = torch_npu.npu_convert_weight_to_int4pack(centred.flatten(0, -2))
        packed = lines.unflatten(0, centred.shape[:-1]) if has_lead else lines
    return GroupQuantWeight(packed, scale, offset, group, order, scheme.activations == "token")


def _columns(values: Tensor, group: int) -> Tensor:
    """[..., out, groups] -> [..., groups, out]; [..., out] of one group."""
    return values.transpose(-1, -2).contiguous() if group else values.squeeze(-1)


def _sorted(order: Tensor, group: int, ins: int) -> Tensor:
    """The group of each input, int32 [in] -> inputs group by group, int64 [in]."""
    if order.dim() != 1:
        raise ModelError(
            "the experts' 4-bit weights have an order of inputs (desc_act), which --device npu does not "
            "compute; take a "
            "version of the model without it"
        )
    if ins % group or not bool((torch.bincount(order.long().cpu(), minlength=ins // group) == group).all()):
        raise ModelError(
            f"a rank's weights have groups of other sizes than {group} inputs (desc_act), which --device npu "
            "does not "
            "compute; take --tp-size 1, or a version of the model without it"
        )
    return order.argsort(stable=True)


def _check(scheme: PackedInt, group: int, outs: int, ins: int, *, is_stack: bool) -> None:
    name = scheme.name
    if group % GROUP or group >= ins > 0 or (is_stack and group and ins % group):
        raise ModelError(
            f"a rank's weights in {name} have scales for each {group} of {ins} inputs; --device npu takes "
            "multiples of "
            f"{GROUP} that divide them; lower --tp-size, or take another version of the model"
        )
    if scheme.bits == 4 and outs % WORD:
        raise ModelError(
            f"a rank's weights in {name} have {outs} outputs, and --device npu takes multiples of {WORD}; "
            "lower --tp-size"
        )
    if is_stack and group and scheme.bits == 8:
        raise ModelError(
            f"the experts' weights in {name} have scales by group, which --device npu takes for 4 bits "
            "alone; take a "
            "version of the model in 4 bits, or with int8 activations"
        )


def fake_quantize(x: Tensor) -> Tensor:
    """x rounded to int8 with a scale for each row, and back."""
    numbers, scale = torch_npu.npu_dynamic_quant(x.contiguous())
    return (numbers * scale.unsqueeze(1)).to(x.dtype)


def group_quant_matmul(x: Tensor, weight: GroupQuantWeight, bias: Tensor | None) -> Tensor:
    """Product x [N, in] -> [N, out] in the dtype of x."""
    inputs = fake_quantize(x) if weight.quantizes_inputs else x
    if weight.order is not None:
        inputs = inputs.index_select(1, weight.order)
    out = torch_npu.npu_weight_quant_batchmatmul(
        inputs.contiguous(), weight.weight, weight.scale, weight.offset, antiquant_group_size=weight.group
    )
    return out if bias is None else out + bias
