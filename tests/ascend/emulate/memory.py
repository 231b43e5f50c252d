"""Device memory is host memory here: CPU tensors over it, blank ones, and shapes without any. And which of it
has a private format."""

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.table import Limits

ND, NZ = 2, 29
_private: dict[int, weakref.ref[Any]] = {}  # address of a storage in FRACTAL_NZ -> the storage


def is_device(value: Any) -> bool:
    """Whether it is a tensor on the NPU."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def leaves(value: Any, found: list[Any]) -> list[Any]:
    """The values in nested lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        for each in value:
            leaves(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            leaves(each, found)
    else:
        found.append(value)
    return found


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(each, change) for each in value)
    if isinstance(value, dict):
        return {name: mapped(each, change) for name, each in value.items()}
    return value


def host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory. It does not keep that memory: who frees a tensor too early loses its
    contents, as on the device."""
    if tensor.device.type != "npu":
        return tensor
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if size == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    made = torch.empty(0, dtype=tensor.dtype).set_(
        raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    return mark(made) if is_private(address) else made


def blank(tensor: Tensor) -> Tensor:
    """Zeros that lie like the tensor, in place of values that are not there yet."""
    if tensor.device.type != "npu":
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
    return mark(made) if is_private(tensor.untyped_storage().data_ptr()) else made


def meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def device_like(tensor: Tensor, torch_device: torch.device) -> Tensor:
    """Memory on the device for what a CPU or meta tensor describes; floats are NaN until they are
    computed."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch_device)
    if made.numel() and made.dtype.is_floating_point and not Limits.no_values:
        host(made).fill_(math.nan)
    return made


def mark(tensor: Tensor) -> Tensor:
    """Remembers the format of a tensor for `format_of`."""
    tensor.npu_format = NZ  # type: ignore[attr-defined]
    return tensor


def format_of(tensor: Tensor) -> int:
    """Of a CPU tensor that `host` or `blank` made."""
    return getattr(tensor, "npu_format", ND)


def is_private(address: int) -> bool:
    """Whether memory belongs to a capture."""
    return address in _private and _private[address]() is not None


def make_private(tensor: Tensor) -> None:
    """Marks memory as belonging to a capture."""
    storage = tensor.untyped_storage()
    _private[storage.data_ptr()] = weakref.ref(storage)
