"""Host values to the device, without making the host wait for what the device does."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, torch_device: torch.device) -> Tensor:
    """As it is, which must be writable; where the device has memory of its own, through pinned memory, in the
    order of its work."""
    tensor = torch.from_numpy(array)
    return tensor if torch_device.type == "cpu" else tensor.pin_memory().to(torch_device, non_blocking=True)


def to_device(array: np.ndarray, torch_device: torch.device) -> Tensor:
    """A fresh int64 tensor; the array may be read-only, as those of a ring are."""
    return upload(array.astype(np.int64), torch_device)


def integers(values: Sequence[int] | Sequence[Sequence[int]], torch_device: torch.device) -> Tensor:
    """int64"""
    return upload(np.array(values, np.int64), torch_device)


def floats(values: Sequence[float] | Sequence[Sequence[float]], torch_device: torch.device) -> Tensor:
    """float32"""
    return upload(np.array(values, np.float32), torch_device)
