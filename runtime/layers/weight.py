"""What a model is made of: layers that hold weights and other layers, and where each weight comes from in a
checkpoint.

A checkpoint tensor fills one *part* of a weight: several parts where weights are fused (q, k and v in one
matrix), and only this rank's *share* of a part where they are sharded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.models.quantization_schemes import Stored

FLOATS = ("F32", "BF16", "F16", "F64")  # as safetensors spells them
Lookup = Callable[[str], Stored | None]  # module below a layer -> how its weight is stored; None: in full


class Ranks(Protocol):
    """Who shares a dimension, and which of them this is."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among those that it shares some weights with: less than all ranks, or groups of them."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's [start, start + size) of a dimension that has `full` entries in the checkpoint."""

    full: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor of shape `shape`; its `share` of dimension `dim` goes to `offset` of the weight,
    unless `load` says otherwise."""

    shape: tuple[int, ...]
    dim: int
    share: Share
    offset: int = 0
    load: Callable[[Any], None] | None = None  # reads what this rank needs of a slice, to wherever it goes
    dtypes: tuple[str, ...] = FLOATS
    shapes: tuple[tuple[int, ...], ...] = ()  # others that will do
    draw: str = ""  # what random numbers for it look like, where they are not like weights


class Weight:
    """A tensor on the device, in parts that the loader fills; a weight that is not fused has one part, named
    ""."""

    def __init__(
        self, shape: tuple[int, ...], parts: dict[str, Part], dtype: torch.dtype, torch_device: torch.device
    ) -> None:
        self.tensor = torch.empty(shape, dtype=dtype, device=torch_device)
        self.parts = parts
        self.is_optional = False

    @classmethod
    def of(cls, tensor: Tensor, parts: dict[str, Part], *, is_optional: bool = False) -> "Weight":
        """A weight that lies in a larger tensor, or whose parts know where they go. An optional one may be
        missing in a checkpoint."""
        weight = cls.__new__(cls)
        weight.tensor, weight.parts, weight.is_optional = tensor, parts, is_optional
        return weight

    def destination(self, part: Part) -> Tensor:
        return self.tensor.narrow(part.dim, part.offset, part.share.size)


def cache_scale() -> Weight:
    """What some checkpoints have for a cache of few bits: one number; 1 where there is none."""
    tensor = torch.ones(1)
    part = Part((1,), 0, Share(1, 0, 1), load=lambda raw: tensor.copy_(raw[...].reshape(1)), shapes=((),))
    return Weight.of(tensor, {"": part}, is_optional=True)


class Layer:
    """Base of all that holds weights: they are found by the names of the attributes, as in the checkpoint."""

    def open(self, lookup: Lookup) -> None:
        """Called once, before anything is loaded: takes memory for weights that may be stored in several
        ways."""

    def finish(self) -> None:
        """Called once, when all weights are loaded."""

    def children(self) -> Iterator[tuple[str, "Layer | Weight"]]:
        for name, value in vars(self).items():
            if isinstance(value, (Layer, Weight)):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Layer))


class Held(Layer):
    """A weight that a layer above computes with."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight


def named_weights(layer: Layer, prefix: str = "") -> Iterator[tuple[str, Weight]]:
    """All weights below a layer with their dotted names."""
    for name, child in layer.children():
        if isinstance(child, Weight):
            yield prefix + name, child
        else:
            yield from named_weights(child, f"{prefix}{name}.")


def open_weights(layer: Layer, lookup: Lookup, prefix: str = "") -> None:
    """Takes memory for the weights of a layer and of all below it. `lookup` wants full names."""
    layer.open(lambda name: lookup(prefix + name))
    for name, child in list(layer.children()):
        if isinstance(child, Layer):
            open_weights(child, lookup, f"{prefix}{name}.")


def finish(layer: Layer) -> None:
    """Tells a layer and all below it that their weights are complete; a layer may change what those below it
    will pack."""
    layer.finish()
    for _, child in layer.children():
        if isinstance(child, Layer):
            finish(child)


def even_share(full: int, ranks: Ranks, what: str, flag: str = "--tp-size") -> Share:
    """An equal part of `full` for each rank. Raises ModelError where that cannot be."""
    if full % ranks.size:
        raise ModelError(
            f"{flag} {ranks.size} does not divide the model's {what} ({full}); choose a divisor of it"
        )
    size = full // ranks.size
    return Share(full, ranks.rank * size, size)


def kv_share(num_kv_heads: int, ranks: Ranks) -> Share:
    """Key/value heads of this rank; where there are fewer than ranks, neighbours hold the same one."""
    if num_kv_heads >= ranks.size or ranks.size % num_kv_heads:
        return even_share(num_kv_heads, ranks, "key/value heads")
    return Share(num_kv_heads, ranks.rank * num_kv_heads // ranks.size, 1)


def scaled(share: Share, unit: int) -> Share:
    """The share of a dimension that has `unit` entries for each one of `share`."""
    return Share(share.full * unit, share.start * unit, share.size * unit)
