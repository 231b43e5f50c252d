"""Copies from the host to the device that do not make the host wait for the device."""

from collections.abc import Callable, Sequence

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


ALIGNED = 16  # bytes: kernels are compiled for pointers that are multiples of it


class Packed:
    """An array of a PackedUpload."""

    def __init__(self, upload: "PackedUpload", array: np.ndarray, dtype: np.dtype) -> None:
        self.array = array
        self.dtype = dtype
        self._upload = upload
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The array on the device. Everything that was added so far travels when the first one is read."""
        if self._tensor is None:
            self._upload.send()
        assert self._tensor is not None, "what was added has travelled"
        return self._tensor

    def arrive(self, tensor: Tensor) -> None:
        """The copy is launched, and `tensor` is its result."""
        self._tensor = tensor


class PackedUpload:
    """Arrays of one step that travel together: in one buffer, pinned where the device has memory of its own,
    and one copy. What is added later travels in another one."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.num_copies = 0
        self._packed: list[Packed] = []
        self._actions: list[Callable[[], None]] = []

    def add(self, array: np.ndarray, dtype: type[np.generic] | None = None) -> Packed:
        """An array, which may be read-only and must not change until it has travelled; as `dtype`, or its
        own."""
        packed = Packed(self, array, array.dtype if dtype is None else np.dtype(dtype))
        self._packed.append(packed)
        return packed

    def int64(self, array: np.ndarray) -> Packed:
        """An array as int64."""
        return self.add(array, np.int64)

    def then(self, action: Callable[[], None]) -> None:
        """Called behind the copy, before any tensor is read: changes what later work reads."""
        self._actions.append(action)

    def send(self) -> None:
        """Copies what was added, then does what waits for it."""
        packed, self._packed = self._packed, []
        actions, self._actions = self._actions, []
        if packed:
            self._copy(packed)
        for action in actions:
            action()

    def _copy(self, packed: list[Packed]) -> None:
        sizes = [one.array.size * one.dtype.itemsize for one in packed]
        begins = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes)]).tolist()
        if has_memory := self.torch_device.type != "cpu":
            buffer = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
            host = buffer.numpy()
        else:
            host = np.empty(max(begins[-1], 1), np.uint8)  # nothing has no view of another dtype
            buffer = torch.from_numpy(host)
        for one, begin, size in zip(packed, begins, sizes, strict=False):
            host[begin : begin + size].view(one.dtype)[:] = one.array.ravel()
        there = buffer.to(self.torch_device, non_blocking=True) if has_memory else buffer
        for one, begin, size in zip(packed, begins, sizes, strict=False):
            number = torch.from_numpy(np.empty(0, one.dtype)).dtype
            one.arrive(there[begin : begin + size].view(number).view(one.array.shape))
        self.num_copies += 1
