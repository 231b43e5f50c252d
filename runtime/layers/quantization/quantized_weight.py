"""Weights in few bits, as they lie on a rank while a checkpoint fills them: the tensors of devices/base.py's
`Quantized`.

A checkpoint's tensors are turned to that form as they are read (layouts.py), and only the share of this rank:
from here on nobody needs to know by which tool a checkpoint was made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.errors import ModelError
from runtime.layers.quantization.layouts import Piece, layout
from runtime.layers.weight import Layer, Part, Share, Weight
from runtime.models.quantization_schemes import Codes, Fp8, Int8, Scheme, Stored

# sign and the rest of a float8_e4m3 where float32 has its own, but for NaN
FLOAT_BITS, FLOAT_REBASE = -0x78100000, 2.0**120
PER_ROW = ("weight", "scale", "zeros", "sums")  # tensors that have a row for each output


@dataclass(frozen=True, slots=True)
class Groups:
    """Which of the checkpoint's groups of inputs this rank has."""

    width: int  # inputs of one here; 0: all
    ids: Tensor  # int64: which of the checkpoint's each of them is


def groups(scheme: Scheme, ins: Share) -> Groups:
    """A split in the middle of a group makes several smaller ones of it."""
    group = getattr(scheme, "group", 0)
    if not group:
        return Groups(0, torch.zeros(1, dtype=torch.int64))
    if isinstance(scheme, Codes) and scheme.is_ordered:
        return Groups(group, torch.arange(-(-ins.full // group)))
    is_aligned = ins.size == ins.full or (ins.start % group == 0 and ins.size % group == 0)
    width = group if is_aligned else gcd(group, ins.start, ins.size)
    return Groups(width, (ins.start + torch.arange(0, ins.size, width)) // group)


def allocate(
    scheme: Scheme, rows: int, ins: Share, torch_device: torch.device, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """By name, the tensors of a weight, or of a stack of `lead` weights."""
    num_groups = len(groups(scheme, ins).ids)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"scale": ((rows, num_groups), torch.float32)}
    if isinstance(scheme, Codes):
        shapes["weight"] = ((rows, ins.size * scheme.bits // 8), torch.uint8)
        if scheme.has_zeros:
            shapes["zeros"] = ((rows, num_groups), torch.uint8)
        if scheme.is_ordered:
            shapes["order"] = ((ins.size,), torch.int32)
    else:
        shapes["weight"] = ((rows, ins.size), torch.float8_e4m3fn if isinstance(scheme, Fp8) else torch.int8)
    if scheme.activations == "tensor":
        shapes["input_scale"] = ((1,), torch.float32)
        if isinstance(scheme, Int8):
            shapes |= {"input_offset": ((1,), torch.float32), "sums": ((rows,), torch.int32)}
    return {
        name: torch.zeros((*lead, *shape), dtype=dtype, device=torch_device)
        for name, (shape, dtype) in shapes.items()
    }


class Storage(Layer):
    """One weight in few bits; its children are called what the checkpoint calls them."""

    def __init__(
        self,
        stored: Stored,
        outs: dict[str, Share],
        ins: Share,
        tensors: dict[str, Tensor],
        *,
        counts_sums: bool,
    ) -> None:
        """`tensors` are those of `allocate`; with shares of no size none are needed. `counts_sums`: of those
        that split the inputs, one rank adds what a checkpoint has for them all."""
        scheme = stored.scheme
        if isinstance(scheme, Codes) and ins.size * scheme.bits % 8:
            raise ModelError(
                f"--tp-size gives a rank {ins.size} inputs of a layer with {scheme.bits}-bit weights; lower it"
            )
        self.stored, self.tensors = stored, tensors
        here = groups(scheme, ins)
        self.scheme = scheme if isinstance(scheme, Int8) else structs.replace(scheme, group=here.width)
        entries: dict[str, dict[str, Part]] = {}
        self.optional: set[str] = set()
        offset, seen = 0, set[str]()
        for name, share in outs.items():
            rows = {
                key: t[offset : offset + share.size] if key in PER_ROW else t for key, t in tensors.items()
            }
            found = layout(Piece(stored, rows, share, ins, here.ids, counts_sums, seen))
            offset += share.size
            for leaf, part in found.parts.items():
                entries.setdefault(leaf, {})[name] = part
            self.optional |= found.optional
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.entries = {
            leaf: Weight.of(torch.empty(0), parts, is_optional=leaf in self.optional)
            for leaf, parts in entries.items()
        }
        self.has_bias_inside = "quant_bias" in entries

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        yield from self.entries.items()


def completed(storage: Storage, stack: dict[str, Tensor] | None = None) -> Quantized:
    """The tensors, when the checkpoint has filled them; those of a `stack` of weights, of which `storage` is
    any, all at once."""
    stored, scheme, tensors = storage.stored, storage.scheme, stack or storage.tensors
    if stored.layout == "compressed-tensors" and scheme == Int8("tensor"):
        weight, offset = tensors["weight"], tensors["input_offset"].int()
        tensors["sums"].copy_(-weight.sum(-1, dtype=torch.int32) * offset)
        tensors["scale"].mul_(tensors["input_scale"].unsqueeze(-1))
    return Quantized(scheme, **tensors)


def dequantized(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """[out, in]: what a weight is, rounded once to `dtype`; [E, out, in] of a stack."""
    scheme, scale, zeros = weight.scheme, weight.scale, weight.zeros
    if isinstance(scheme, Codes):
        values = codes(weight.weight, scheme.bits).float()
        if zeros is None:
            values.sub_(2.0 ** (scheme.bits - 1))
        else:
            _by_group(values, zeros, weight).sub_(_column(zeros, values, weight))
    else:
        values = floats(weight.weight)
    if isinstance(scheme, Int8) and weight.input_scale is not None:
        scale = scale / weight.input_scale.unsqueeze(-1)
    _by_group(values, scale, weight).mul_(_column(scale, values, weight))
    return values.to(dtype)


def codes(octets: Tensor, bits: int) -> Tensor:
    """[..., bytes] -> uint8 [..., columns]."""
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def floats(values: Tensor) -> Tensor:
    """float32 of int8 or float8_e4m3fn, which torch converts one by one on the cpu; moving the bits to their
    places is 20 times faster."""
    if values.dtype != torch.float8_e4m3fn or values.device.type != "cpu":
        return values.float()
    bits = values.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(FLOAT_BITS)
    return bits.view(torch.float32).mul_(FLOAT_REBASE)


def _neighbours(values: Tensor, per_group: Tensor, weight: Quantized) -> int:
    """Inputs in a group, where groups are neighbours of equal size; else 0."""
    group = 0 if isinstance(weight.scheme, Int8) or weight.order is not None else weight.scheme.group
    return group if group and per_group.shape[-1] > 1 and values.shape[-1] % group == 0 else 0


def _by_group(values: Tensor, per_group: Tensor, weight: Quantized) -> Tensor:
    """A view of values [..., out, in] with which `_column` can be combined."""
    group = _neighbours(values, per_group, weight)
    return values.unflatten(-1, (-1, group)) if group else values


def _column(per_group: Tensor, values: Tensor, weight: Quantized) -> Tensor:
    """[..., out, groups] -> what goes with each of `values`."""
    if _neighbours(values, per_group, weight):
        return per_group.unsqueeze(-1)
    if per_group.shape[-1] == 1:
        return per_group
    columns = values.shape[-1]
    if weight.order is not None and per_group.dim() == 2:
        return per_group.index_select(1, weight.order)
    if weight.order is not None:
        return per_group.gather(-1, weight.order.long().unsqueeze(-2).expand(*values.shape[:-1], columns))
    assert not isinstance(weight.scheme, Int8)
    return per_group.repeat_interleave(weight.scheme.group, -1)[..., :columns]
