"""The tensors that a rank holds of a quantized weight."""

from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch
from torch import Tensor

from runtime.layers.weight import Shard
from runtime.models.config.quantization_schemes import Fp8, Full, Int8, PackedInt, Scheme


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
    scheme: Scheme,
    rows: int,
    inputs: Shard,
    dtype: torch.dtype,
    torch_device: torch.device,
    lead: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    """The tensors of a weight [rows, inputs], or of a stack of `lead` weights, by the names of Quantized's
    fields. They are zeros. `dtype`: the model's, in which dequantized weights are."""
    if isinstance(scheme, Full):
        return {"weight": zeros((*lead, rows, inputs.size), dtype, torch_device)}
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
