"""Quantized weights as they lie on a rank while a checkpoint fills them: the tensors of `Quantized`
(devices/operands.py).

The tensors of a checkpoint are converted as they are read (layouts.py), and only this rank's shard of them.
From here on it makes no difference which tool wrote the checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Quantized, RowQuantizer
from runtime.errors import ModelError
from runtime.layers.quantization.layouts import module_tensors
from runtime.layers.quantization.module_shard import ModuleShard
from runtime.layers.weight import Layer, Shard, SourceTensor, Weight
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme, WeightFormat

# mask and factor that make a float8_e4m3 of bits moved to the places of a float32's; not for NaN
FP8_BITS, FP8_REBASE = -0x78100000, 2.0**120
ROW_TENSORS = ("weight", "scale", "zeros", "sums")  # tensors that have a row for each output


@dataclass(frozen=True, slots=True)
class InputGroups:
    """The groups of inputs that this rank has scales for."""

    width: int  # inputs in a group on this rank; 0: all inputs
    ids: Tensor  # int64: for each group here, its index in the checkpoint


def input_groups(scheme: Scheme, inputs: Shard) -> InputGroups:
    """A split of the inputs in the middle of a group makes several smaller groups of it."""
    group = getattr(scheme, "group_size", 0)
    if not group:
        return InputGroups(0, torch.zeros(1, dtype=torch.int64))
    if isinstance(scheme, PackedInt) and scheme.has_g_idx:
        return InputGroups(group, torch.arange(-(-inputs.full // group)))
    is_aligned = inputs.size == inputs.full or (inputs.start % group == 0 and inputs.size % group == 0)
    width = group if is_aligned else gcd(group, inputs.start, inputs.size)
    return InputGroups(width, (inputs.start + torch.arange(0, inputs.size, width)) // group)


def allocate_quantized(
    scheme: Scheme, rows: int, inputs: Shard, torch_device: torch.device, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """The tensors of a weight [rows, inputs], or of a stack of `lead` weights, by the names of Quantized's
    fields. They are zeros."""
    num_groups = len(input_groups(scheme, inputs).ids)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"scale": ((rows, num_groups), torch.float32)}
    if isinstance(scheme, PackedInt):
        shapes["weight"] = ((rows, inputs.size * scheme.bits // 8), torch.uint8)
        if scheme.has_zero_points:
            shapes["zeros"] = ((rows, num_groups), torch.uint8)
        if scheme.has_g_idx:
            shapes["order"] = ((inputs.size,), torch.int32)
    else:
        shapes["weight"] = (
            (rows, inputs.size),
            torch.float8_e4m3fn if isinstance(scheme, Fp8) else torch.int8,
        )
    if scheme.activations == "tensor":
        shapes["input_scale"] = ((1,), torch.float32)
        if isinstance(scheme, Int8):
            shapes |= {"input_offset": ((1,), torch.float32), "sums": ((rows,), torch.int32)}
    return {name: zeros((*lead, *shape), dtype, torch_device) for name, (shape, dtype) in shapes.items()}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, torch_device: torch.device) -> Tensor:
    """Zeros. On the CPU they take memory when they are first written: weights that are not loaded take
    none."""
    if torch_device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=torch_device)
    memory = np.zeros(prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class QuantizedWeight(Layer):
    """One quantized weight. Its children have the names that the checkpoint gives them."""

    def __init__(
        self,
        format: WeightFormat,
        outputs: dict[str, Shard],
        inputs: Shard,
        tensors: dict[str, Tensor],
        *,
        loads_quant_bias: bool,
        quantizer: RowQuantizer | None = None,
    ) -> None:
        """`tensors`: those of `allocate_quantized`; none are needed for shards of size 0. `loads_quant_bias`:
        of the ranks that split the inputs, one adds the checkpoint's quant_bias, which is for all of them.
        `quantizer`: the device's, for weights that are quantized while they are loaded.
        Raises ModelError for a split that leaves half a byte."""
        scheme = format.scheme
        if isinstance(scheme, PackedInt) and inputs.size * scheme.bits % 8:
            raise ModelError(
                f"--tp-size gives a rank {inputs.size} inputs of a layer with {scheme.bits}-bit weights; "
                "lower it"
            )
        self.format, self.tensors = format, tensors
        own = input_groups(scheme, inputs)
        self.scheme = scheme if isinstance(scheme, Int8) else structs.replace(scheme, group_size=own.width)
        sources: dict[str, dict[str, SourceTensor]] = {}
        optional: set[str] = set()
        offset, seen = 0, set[str]()
        for name, shard in outputs.items():
            rows = {
                key: t[offset : offset + shard.size] if key in ROW_TENSORS else t
                for key, t in tensors.items()
            }
            module = module_tensors(
                ModuleShard(format, rows, shard, inputs, own.ids, loads_quant_bias, seen, quantizer)
            )
            offset += shard.size
            for leaf, source in module.sources.items():
                sources.setdefault(leaf, {})[name] = source
            optional |= module.optional
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.weights = {
            leaf: Weight(torch.empty(0), parts, is_optional=leaf in optional)
            for leaf, parts in sources.items()
        }
        self.includes_bias = "quant_bias" in sources

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """The checkpoint's tensors, by their names."""
        yield from self.weights.items()


def quantized_operand(weight: QuantizedWeight, stack: dict[str, Tensor] | None = None) -> Quantized:
    """The loaded weight as the device's operators take it. With `stack`, the tensors of a stack of weights,
    of which `weight` is any one."""
    format, scheme, tensors = weight.format, weight.scheme, stack or weight.tensors
    if format.layout == "compressed-tensors" and scheme == Int8("tensor"):
        codes, offset = tensors["weight"], tensors["input_offset"].int()
        tensors["sums"].copy_(-codes.sum(-1, dtype=torch.int32) * offset)
        tensors["scale"].mul_(tensors["input_scale"].unsqueeze(-1))
    return Quantized(scheme, **tensors)


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
