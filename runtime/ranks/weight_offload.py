"""Weights in page-locked host memory.

    OffloadedModel   all weights, while their device memory is released (--enable-weights-cpu-backup,
                     --enable-draft-weights-cpu-backup)
    LayerOffload     weights of some layers, always: they are copied to the device before the layer computes
                     (--cpu-offload-gb, --offload-group-size)

Offloaded layers share a few buffers on the device, and their tensors are views into them with fixed
addresses. A layer's weights are copied at once, on a stream of their own, and a captured step replays the
copies.

    buffer 0    | layer 0 computes |   fetch 2   | layer 2 computes |  fetch 0 for the next step
    buffer 1    |     fetch 1      | layer 1 computes |   fetch 3   | layer 3 computes |  fetch 1 ...

When a step ends all copies are complete, and the first layers are in the buffers for the next step, so
captured and other steps may follow each other in any order.

A piece of a step (piecewise_graphs.py) is a graph without copies: a copy outlasts the graph in which it would
begin. They are launched between the pieces: a piece waits for the weights of all layers that it begins, and
the copies for those that it ends begin behind it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.packed import PackedTensors
from runtime.devices.streams import Event
from runtime.layers.weight import Layer, Weight
from runtime.models.base import Model

Parts = tuple[Layer | Model | Tensor, ...]
P = ParamSpec("P")
T = TypeVar("T")

ALIGNED = 256  # bytes, as devices' allocators align
# what computes with a decoder's weights first and last; encoders' layers have one method for all
HALVES = ("before_attention", "after_attention")


def tensors(layer: Layer | Model | Parts) -> Iterator[Tensor]:
    """All non-empty tensors that a layer and its sublayers compute with, packed or not, once each."""
    return (one for one in operands(layer) if isinstance(one, Tensor) and one.numel())


def operands(layer: Layer | Model | Parts) -> Iterator[object]:
    """All that a layer and its sublayers are made of, once each."""
    seen: set[int] = set()
    stack: list[object] = [layer]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, list | tuple):
            stack += reversed(one)
        elif isinstance(one, Layer | Weight):
            stack += reversed(vars(one).values())
        elif is_dataclass(one) and not isinstance(one, type | Device):
            stack += [getattr(one, field.name) for field in reversed(fields(one))]


def span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last, for any strides."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ) * tensor.element_size()


def within(memory: Tensor, begin: int, tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype at byte `begin` of `memory`, a multiple of ALIGNED."""
    return memory[begin : begin + span(tensor)].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class OffloadBuffer:
    """Copies of tensors in one contiguous block of host memory."""

    host: Tensor  # uint8
    offsets: list[tuple[Tensor, int]]  # tensors, and the bytes at which their copies begin
    packed: list[PackedTensors]  # those that know where these tensors are

    @classmethod
    def of(cls, layer: Layer | Model | Parts) -> "OffloadBuffer":
        """Copies the tensors of a layer to host memory."""
        packed = [one for one in operands(layer) if isinstance(one, PackedTensors)]
        offsets, end = [], 0
        for tensor in tensors(layer):
            offsets.append((tensor, end))
            end += -(-span(tensor) // ALIGNED) * ALIGNED
        host = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        for tensor, begin in offsets:
            within(host, begin, tensor).copy_(tensor)
        return cls(host, offsets, packed)

    def point_into(self, memory: Tensor) -> None:
        """Makes the tensors views of `memory`, which is laid out as `host`."""
        for tensor, begin in self.offsets:
            tensor.data = within(memory, begin, tensor)
        for packed in self.packed:
            packed.moved()


class OffloadedModel:
    """A model's weights in host memory. Making it copies them from the device and frees their device
    memory."""

    def __init__(self, model: Layer | Model | Parts) -> None:
        self._buffer = OffloadBuffer.of(model)
        self._buffer.point_into(self._buffer.host)

    def restore(self, torch_device: torch.device) -> None:
        """Copies the weights back to the device. Raises if there is no memory; nothing has changed then."""
        memory = torch.empty(len(self._buffer.host), dtype=torch.uint8, device=torch_device)
        memory.copy_(self._buffer.host)
        self._buffer.point_into(memory)


@dataclass(frozen=True, slots=True)
class PieceLayers:
    """Offloaded layers of a piece of a step, by their places in LayerOffload."""

    entered: list[int] = field(default_factory=list)  # those that begin in it
    left: list[int] = field(default_factory=list)  # those that end in it


class LayerOffload:
    """The offloaded layers of one rank, in order. Their weights were made in host memory."""

    def __init__(self, device: Device, layers: list[Layer], ahead: int) -> None:
        assert device.streams is not None, "options allow no offload on a device without streams"
        self._streams = device.streams
        self._side = device.streams.Stream()
        self._layers = [OffloadBuffer.of(layer) for layer in layers]
        size = max(len(buffer.host) for buffer in self._layers)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device.torch_device) for _ in range(ahead + 1)
        ]
        self._content = [-1] * len(
            self._buffers
        )  # for each buffer the layer whose weights are there, or are being copied there
        # for each buffer the event behind a copy that no stream has waited for yet
        self._events: list[Event | None] = [None] * len(self._buffers)
        self._recorded: PieceLayers | None = None  # of the piece that is being captured
        for index, (layer, buffer) in enumerate(zip(layers, self._layers, strict=True)):
            buffer.point_into(self._buffers[index % len(self._buffers)])
            first, last = HALVES if hasattr(layer, HALVES[0]) else ("forward", "forward")
            setattr(layer, first, partial(self._enter, index, getattr(layer, first)))
            setattr(layer, last, partial(self._leave, index, getattr(layer, last)))
        for index in range(len(self._buffers)):
            self._fetch(index)
        self._join()

    @property
    def host_bytes(self) -> int:
        """Host memory of the offloaded layers."""
        return sum(len(buffer.host) for buffer in self._layers)

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(len(buffer) for buffer in self._buffers)

    @contextmanager
    def recorded(self) -> Iterator[PieceLayers]:
        """The layers that begin and end within: nothing is copied. `before` and `behind` are called around
        each replay of what was captured within."""
        self._recorded = found = PieceLayers()
        try:
            yield found
        finally:
            self._recorded = None

    def before(self, layers: PieceLayers) -> None:
        """The current stream waits for the weights of the layers that a piece begins."""
        for index in layers.entered:
            self._await(index)

    def behind(self, layers: PieceLayers) -> None:
        """Copies for the layers that a piece has ended begin behind the work of the current stream."""
        for index in layers.left:
            self._release(index)

    def _enter(self, index: int, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._recorded is None:
            self._await(index)
        else:
            self._recorded.entered.append(index)
        return compute(*args, **kwargs)

    def _leave(self, index: int, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        result = compute(*args, **kwargs)
        if self._recorded is None:
            self._release(index)
        else:
            self._recorded.left.append(index)
        return result

    def _await(self, index: int) -> None:
        buffer = index % len(self._buffers)
        if self._content[buffer] != index:  # an earlier step failed midway
            self._fetch(index)
        if (event := self._events[buffer]) is not None:
            self._streams.current_stream().wait_event(event)
            self._events[buffer] = None

    def _release(self, index: int) -> None:
        buffer = index % len(self._buffers)
        following = index + len(self._buffers)
        self._fetch(following if following < len(self._layers) else buffer)
        if index == len(self._layers) - 1:
            self._join()

    def _fetch(self, index: int) -> None:
        """Copies a layer's weights to its buffer, behind the work of the main stream, which used the buffer
        last."""
        buffer, host = index % len(self._buffers), self._layers[index].host
        self._side.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._side):
            self._buffers[buffer][: len(host)].copy_(host, non_blocking=True)
            event = self._events[buffer] = self._streams.Event()
            event.record(self._side)
        self._content[buffer] = index

    def _join(self) -> None:
        self._streams.current_stream().wait_stream(self._side)
        self._events = [None] * len(self._buffers)
