"""Copies of a step's inputs to the device and of its results to the host, which do not make the host wait.

To the device: host arrays in pinned memory, copied in the order of the device's work. To the host: tensors
copied after that work on a stream of their own, so that the next step need not wait for the copy, and an
event that marks its end. torch's allocators of pinned and of device memory keep both ends alive until the
device is done with them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.devices.streams import Event, Stream, Streams


class Fetched(Protocol):
    """Tensors on their way to the host."""

    def is_done(self) -> bool:
        """Whether `arrays` returns at once."""
        ...

    def arrays(self) -> list[np.ndarray]:
        """Waits for them, in any thread."""
        ...


class Transfers(Protocol):
    """Copies of one device, called by the thread that launches its work."""

    def upload(self, array: np.ndarray, to: Tensor) -> None:
        """Copies into a tensor that stays where it is; behind the work launched so far, and before what is
        launched later."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Brings tensors as the work launched so far leaves them, which later work must not overwrite."""
        ...

    def follow(self, stream: Stream) -> None:
        """What is fetched next comes behind what that stream has been given so far."""
        ...


class Here:
    """Tensors that were never anywhere else."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def is_done(self) -> bool:
        """Whether `arrays` returns at once: always."""
        return True

    def arrays(self) -> list[np.ndarray]:
        """The tensors."""
        return self._arrays


class Direct:
    """Copies of a device whose calls are done when they return."""

    def upload(self, array: np.ndarray, to: Tensor) -> None:
        """Copies into a tensor."""
        to.copy_(torch.from_numpy(array))

    def fetch(self, tensors: Sequence[Tensor]) -> Here:
        """The tensors as they are now."""
        return Here([tensor.cpu().numpy() for tensor in tensors])

    def follow(self, stream: Stream) -> None:
        """Waits for it."""
        stream.synchronize()


class OnTheWay:
    """Pinned copies, and the event behind them."""

    def __init__(self, copies: list[Tensor], event: Event, take_device: Callable[[], None]) -> None:
        """`take_device`: a thread that waits for an event must have its device."""
        self._copies = copies
        self._event = event
        self._take_device = take_device

    def is_done(self) -> bool:
        """Whether `arrays` returns at once."""
        return bool(self._event.query())

    def arrays(self) -> list[np.ndarray]:
        """Waits for the copies, in any thread."""
        self._take_device()
        self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


class Streamed:
    """Copies of a device with streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down = streams.Stream()
        self._take_device = partial(streams.set_device, streams.current_device())

    def upload(self, array: np.ndarray, to: Tensor) -> None:
        """Copies into a tensor, in the order of the device's work."""
        to.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def follow(self, stream: Stream) -> None:
        """Copies to the host wait for the stream; the main stream does not."""
        self._down.wait_stream(stream)

    def fetch(self, tensors: Sequence[Tensor]) -> OnTheWay:
        """Starts to copy tensors to the host."""
        self._down.wait_stream(self._streams.current_stream())
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        with self._streams.stream(self._down):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._down)
            event = self._streams.Event()
            event.record(self._down)
        return OnTheWay(copies, event, self._take_device)
