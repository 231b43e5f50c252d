"""What quantized weights mean."""

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.models.config.quantization_schemes import Int8, PackedInt

# mask and factor that make a float8_e4m3 of bits moved to the places of a float32's; not for NaN
FP8_BITS, FP8_REBASE = -0x78100000, 2.0**120


def dequantized(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """The weight in full, [out, in], rounded once to `dtype`; [E, out, in] of a stack."""
    scheme, scale, zeros = weight.scheme, weight.scale, weight.zeros
    if isinstance(scheme, PackedInt):
        values = unpack_codes(weight.weight, scheme.bits).float()
        if zeros is None:
            values.sub_(2.0 ** (scheme.bits - 1))
        else:
            _by_group(values, zeros, weight).sub_(_per_column(zeros, values, weight))
    else:
        values = to_float32(weight.weight)
    if isinstance(scheme, Int8) and weight.input_scale is not None:
        scale = scale / weight.input_scale.unsqueeze(-1)
    _by_group(values, scale, weight).mul_(_per_column(scale, values, weight))
    return values.to(dtype)


def unpack_codes(octets: Tensor, bits: int) -> Tensor:
    """Codes of a PackedInt weight: [..., bytes] -> uint8 [..., columns]."""
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def to_float32(values: Tensor) -> Tensor:
    """int8 or float8_e4m3fn as float32. torch converts them one by one on the CPU; to move the bits of a
    float8 to their places in a float32 is 20 times faster."""
    if values.dtype != torch.float8_e4m3fn or values.device.type != "cpu":
        return values.float()
    bits = values.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(FP8_BITS)
    return bits.view(torch.float32).mul_(FP8_REBASE)


def _group_width(values: Tensor, per_group: Tensor, weight: Quantized) -> int:
    """Inputs in a group, where groups are contiguous and of equal size; else 0."""
    group = 0 if isinstance(weight.scheme, Int8) or weight.order is not None else weight.scheme.group_size
    return group if group and per_group.shape[-1] > 1 and values.shape[-1] % group == 0 else 0


def _by_group(values: Tensor, per_group: Tensor, weight: Quantized) -> Tensor:
    """A view of values [..., out, in] that broadcasts with `_per_column`."""
    group = _group_width(values, per_group, weight)
    return values.unflatten(-1, (-1, group)) if group else values


def _per_column(per_group: Tensor, values: Tensor, weight: Quantized) -> Tensor:
    """Per-group values [..., out, groups] as values for each column, to broadcast with `_by_group`."""
    if _group_width(values, per_group, weight):
        return per_group.unsqueeze(-1)
    if per_group.shape[-1] == 1:
        return per_group
    columns = values.shape[-1]
    if weight.order is not None and per_group.dim() == 2:
        return per_group.index_select(1, weight.order)
    if weight.order is not None:
        return per_group.gather(-1, weight.order.long().unsqueeze(-2).expand(*values.shape[:-1], columns))
    assert not isinstance(weight.scheme, Int8)
    return per_group.repeat_interleave(weight.scheme.group_size, -1)[..., :columns]
