"""Copies from the host to the device that do not make the host wait for the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, torch_device: torch.device) -> Tensor:
    """The array, which must be writable, as a tensor of the same dtype. On a device with memory of its own it
    is copied through pinned memory, in the order of the device's work; on the CPU it is shared."""
    tensor = torch.from_numpy(array)
    return tensor if torch_device.type == "cpu" else tensor.pin_memory().to(torch_device, non_blocking=True)


def pinned(tensor: Tensor, torch_device: torch.device) -> Tensor:
    """A tensor of the host in pinned memory, for copies to the device that the host does not wait for; on the
    CPU the tensor itself. The thread must have taken the device."""
    return tensor if torch_device.type == "cpu" else tensor.pin_memory()


def upload_int64(array: np.ndarray, torch_device: torch.device) -> Tensor:
    """A fresh int64 tensor. The array may be read-only, as those of a ring are."""
    return upload(array.astype(np.int64), torch_device)


def int64_tensor(values: Sequence[int] | Sequence[Sequence[int]], torch_device: torch.device) -> Tensor:
    """An int64 tensor of these numbers."""
    return upload(np.array(values, np.int64), torch_device)


def float32_tensor(values: Sequence[float] | Sequence[Sequence[float]], torch_device: torch.device) -> Tensor:
    """A float32 tensor of these numbers."""
    return upload(np.array(values, np.float32), torch_device)
