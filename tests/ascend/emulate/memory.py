"""Device memory is host memory here: CPU tensors over it, blank ones, and shapes without any."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor


def host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory. It does not keep that memory: who frees a tensor too early loses its contents,
    as on the device."""
    if tensor.device.type != "npu":
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype).set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def blank(tensor: Tensor) -> Tensor:
    """Zeros that lie like the tensor, in place of values that are not there yet."""
    if tensor.device.type != "npu":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def device_like(tensor: Tensor, place: torch.device) -> Tensor:
    """Memory on the device for what a CPU or meta tensor describes; floats are NaN until they are computed."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    if made.numel() and made.dtype.is_floating_point:
        host(made).fill_(math.nan)
    return made


def is_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"
