"""Weights that lie in host memory, page-locked, while the device computes with them or does not.

    Parked      all of a model's, while their memory on the device is given back (--enable-weights-cpu-backup)
    Offload     those of some layers, always: they come to the device before the layer computes (--cpu-offload-gb, --offload-group-size)

Layers that are offloaded share a few buffers on the device, and their tensors are views into them that never
move: a layer's weights come as one copy, on a stream of its own, and a captured step replays its copies like
all else.

    buffer 0    | layer 0 computes |   fetch 2   | layer 2 computes |  fetch 0 for the next step
    buffer 1    |     fetch 1      | layer 1 computes |   fetch 3   | layer 3 computes |  fetch 1 ...

When a step ends every copy is done, and the first layers are there for the next one, so that steps, captured
or not, follow each other in any order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.weight import Layer, Weight

ALIGNED = 256  # bytes, as devices' allocators align
# what computes with a decoder's weights first and last; encoders' layers have one method for all
HALVES = ("before_attention", "after_attention")


def tensors(layer: Layer) -> Iterator[Tensor]:
    """All with numbers that a layer and those below it compute with, packed or not, once each."""
    seen: set[int] = set()
    stack: list[Any] = [layer]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.numel():
                yield one
        elif isinstance(one, list | tuple):
            stack += reversed(one)
        elif isinstance(one, Layer | Weight):
            stack += reversed(vars(one).values())
        elif is_dataclass(one) and not isinstance(one, type | Device):
            stack += [getattr(one, field.name) for field in reversed(fields(one))]


def span(tensor: Tensor) -> int:
    """Bytes from its first number to its last, whatever its strides."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ) * tensor.element_size()


def within(memory: Tensor, begin: int, tensor: Tensor) -> Tensor:
    """A tensor like this one at a place in bytes; `begin` is a multiple of ALIGNED."""
    return memory[begin : begin + span(tensor)].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class OffloadBuffer:
    """Tensors in one piece of host memory."""

    host: Tensor  # uint8
    homes: list[tuple[Tensor, int]]  # tensors, and where in it they lie

    @classmethod
    def of(cls, kept: list[Tensor]) -> "OffloadBuffer":
        """Copies them there."""
        homes, end = [], 0
        for tensor in kept:
            homes.append((tensor, end))
            end += -(-span(tensor) // ALIGNED) * ALIGNED
        host = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        for tensor, begin in homes:
            within(host, begin, tensor).copy_(tensor)
        return cls(host, homes)

    def point_into(self, memory: Tensor) -> None:
        """The tensors are views of this memory from now on, whatever it holds."""
        for tensor, begin in self.homes:
            tensor.data = within(memory, begin, tensor)


class OffloadedModel:
    """A model's weights in host memory. Make it while they are on the device; they take none afterwards."""

    def __init__(self, model: Layer) -> None:
        self._buffer = OffloadBuffer.of(list(tensors(model)))
        self._buffer.point_into(self._buffer.host)

    def come_back(self, torch_device: torch.device) -> None:
        """Raises where there is no room, and nothing has changed."""
        memory = torch.empty(len(self._buffer.host), dtype=torch.uint8, device=torch_device)
        memory.copy_(self._buffer.host)
        self._buffer.point_into(memory)


class Offload:
    """The offloaded layers of one rank, in order, which were made in host memory."""

    def __init__(self, device: Device, layers: list[Layer], ahead: int) -> None:
        self._streams = device.streams
        self._side = device.streams.Stream()
        self._shelves = [OffloadBuffer.of(list(tensors(layer))) for layer in layers]
        size = max(len(buffer.host) for buffer in self._shelves)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device.torch_device) for _ in range(ahead + 1)
        ]
        self._has = [-1] * len(self._buffers)  # whose weights are in each buffer, or on their way
        # the event behind a copy that nobody has waited for
        self._coming: list[Any] = [None] * len(self._buffers)
        for index, (layer, buffer) in enumerate(zip(layers, self._shelves, strict=True)):
            buffer.point_into(self._buffers[index % len(self._buffers)])
            first, last = HALVES if hasattr(layer, HALVES[0]) else ("forward", "forward")
            setattr(layer, first, partial(self._enter, index, getattr(layer, first)))
            setattr(layer, last, partial(self._leave, index, getattr(layer, last)))
        for index in range(len(self._buffers)):
            self._fetch(index)
        self._join()

    @property
    def host_bytes(self) -> int:
        return sum(len(buffer.host) for buffer in self._shelves)

    @property
    def buffer_bytes(self) -> int:
        return sum(len(buffer) for buffer in self._buffers)

    def _enter(self, index: int, compute: Callable[..., Any], *args: Any) -> Any:
        buffer = index % len(self._buffers)
        if self._has[buffer] != index:  # a step before came to no end
            self._fetch(index)
        if self._coming[buffer] is not None:
            self._streams.current_stream().wait_event(self._coming[buffer])
            self._coming[buffer] = None
        return compute(*args)

    def _leave(self, index: int, compute: Callable[..., Any], *args: Any) -> Any:
        found = compute(*args)
        buffer = index % len(self._buffers)
        following = index + len(self._buffers)
        self._fetch(following if following < len(self._shelves) else buffer)
        if index == len(self._shelves) - 1:
            self._join()
        return found

    def _fetch(self, index: int) -> None:
        """Behind what the main stream has been given, which uses the buffer last."""
        buffer, host = index % len(self._buffers), self._shelves[index].host
        self._side.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._side):
            self._buffers[buffer][: len(host)].copy_(host, non_blocking=True)
            self._coming[buffer] = self._streams.Event()
            self._coming[buffer].record(self._side)
        self._has[buffer] = index

    def _join(self) -> None:
        self._streams.current_stream().wait_stream(self._side)
        self._coming = [None] * len(self._buffers)
