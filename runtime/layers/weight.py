"""Layers, the weights that they hold, and where each weight comes from in a checkpoint.

A checkpoint tensor fills one part of a weight: a fused weight (q, k and v in one matrix) has several parts.
Where a weight is sharded over the ranks, each rank reads only its shard of each checkpoint tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from types import EllipsisType
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.huge_pages import prefer_huge_pages
from runtime.models.config.quantization_schemes import WeightFormat
from runtime.models.config.shares import Part, channel_part, even_part, head_parts

FLOATS = ("F32", "BF16", "F16", "F64")  # dtype names of safetensors
# name of a module below a layer -> the format of its quantized weight; None: the weight is not quantized
FormatLookup = Callable[[str], WeightFormat | None]
# last name of a checkpoint's module -> the fused module here and the part of it that the checkpoint's module
# fills
PackedModules = dict[str, tuple[str, str]]
Index = EllipsisType | slice | int | tuple[slice | int, ...]
T = TypeVar("T")


class TensorReader(Protocol):
    """A checkpoint tensor that is read when it is indexed, as safetensors' own slice objects are."""

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        ...

    def get_dtype(self) -> str:
        """The dtype by safetensors' name, as BF16."""
        ...

    def __getitem__(self, index: Index) -> Tensor:
        """Reads this part of the tensor."""
        ...


@runtime_checkable
class DirectReader(TensorReader, Protocol):
    """A TensorReader that reads straight to where the numbers are needed."""

    def copy_to(self, target: Tensor, index: Index) -> None:
        """Reads this part into a tensor of any dtype on any device."""
        ...


class RankGroup(Protocol):
    """The ranks that share a dimension: how many they are, and which of them this one is."""

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...


@dataclass(frozen=True, slots=True)
class Subgroup:
    """A RankGroup that is not all ranks: ranks that share one expert, or one rank of each such group."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's range [start, start + size) of a dimension that has `full` entries in the checkpoint."""

    full: int
    start: int
    size: int

    @property
    def range(self) -> slice:
        """The range as a slice."""
        return slice(self.start, self.start + self.size)


def replicated_shard(full: int) -> Shard:
    """All of a dimension, on every rank."""
    return Shard(full, 0, full)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A checkpoint tensor of shape `shape`. Its `shard` of dimension `dim` is copied to `offset` of the
    weight, unless `load` is given."""

    shape: tuple[int, ...]  # (-1,): any length
    dim: int
    shard: Shard
    offset: int = 0
    load: Callable[[TensorReader], None] | None = None  # reads what this rank needs and stores it itself
    dtypes: tuple[str, ...] = FLOATS
    other_shapes: tuple[tuple[int, ...], ...] = ()  # shapes that are accepted as well
    dummy_kind: str = ""  # how --load-format dummy makes it (models/dummy_weights.py); "": as weights


class Weight:
    """A tensor on the device and the checkpoint tensors that the loader fills it from, by the name of the
    part. The only part of a weight that is not fused is named ""."""

    def __init__(
        self, tensor: Tensor, sources: dict[str, SourceTensor], *, is_optional: bool = False
    ) -> None:
        """`tensor` may be a view of a larger one. An optional weight may be missing in a checkpoint."""
        self.tensor = tensor
        self.sources = sources
        self.is_optional = is_optional

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        sources: dict[str, SourceTensor],
        dtype: torch.dtype,
        torch_device: torch.device,
    ) -> "Weight":
        """A weight with uninitialized memory of its own."""
        tensor = torch.empty(shape, dtype=dtype, device=torch_device)
        if tensor.device.type == "cpu":
            prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return cls(tensor, sources)

    def target(self, source: SourceTensor) -> Tensor:
        """The view of the weight that this checkpoint tensor fills."""
        return self.tensor.narrow(source.dim, source.offset, source.shard.size)


def kv_cache_scale() -> Weight:
    """A scale of keys or values that some checkpoints have for an fp8 cache: one number, 1 where it is
    missing."""
    tensor = torch.ones(1)
    source = SourceTensor(
        (1,),
        0,
        replicated_shard(1),
        load=lambda reader: tensor.copy_(reader[...].reshape(1)),
        other_shapes=((),),
    )
    return Weight(tensor, {"": source}, is_optional=True)


class StageLayers(list[T]):
    """The layers that a rank has of a list of which other stages of a pipeline have the rest. Names of
    weights count from `first` on, the index of the first one in the whole list."""

    def __init__(self, layers: Iterable[T], first: int) -> None:
        super().__init__(layers)
        self.first = first


def members(values: list[T]) -> Iterator[tuple[int, T]]:
    """The members of a list, with the numbers by which checkpoints name them."""
    return zip(count(values.first if isinstance(values, StageLayers) else 0), values, strict=False)


class LayerTree(Protocol):
    """What functions below need of a layer or a model: see Layer."""

    def allocate(self, formats: FormatLookup) -> None:
        """See Layer.allocate."""
        ...

    def finish_loading(self) -> None:
        """See Layer.finish_loading."""
        ...

    def children(self) -> "Iterator[tuple[str, Layer | Weight]]":
        """See Layer.children."""
        ...


class Layer:
    """Base of everything that holds weights. Weights and layers below it are found by the names of the
    attributes, which are those of the checkpoint."""

    def allocate(self, formats: FormatLookup) -> None:
        """Takes memory for weights that may be quantized. Called once, before anything is loaded."""

    def finish_loading(self) -> None:
        """Packs or combines weights. Called once, when all of them are loaded."""

    def children(self) -> Iterator[tuple[str, "Layer | Weight"]]:
        """The layers and weights directly below this one, with their names; members of a list are named
        `list.0`."""
        for name, value in vars(self).items():
            if isinstance(value, (Layer, Weight)):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in members(value) if isinstance(item, Layer))


class WeightOnly(Layer):
    """A layer that only names a weight, with which a layer above computes."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight


def named_weights(layer: LayerTree, prefix: str = "") -> Iterator[tuple[str, Weight]]:
    """All weights below a layer with their dotted names."""
    for name, child in layer.children():
        if isinstance(child, Weight):
            yield prefix + name, child
        else:
            yield from named_weights(child, f"{prefix}{name}.")


def allocate_weights(layer: LayerTree, formats: FormatLookup, prefix: str = "") -> None:
    """Takes memory for the weights of a layer and of all below it. `formats` is asked by full names."""
    layer.allocate(lambda name: formats(prefix + name))
    for name, child in list(layer.children()):
        if isinstance(child, Layer):
            allocate_weights(child, formats, f"{prefix}{name}.")


def layers_below(layer: LayerTree) -> "Iterator[Layer]":
    """All layers below a layer, from the top down."""
    for _, child in layer.children():
        if isinstance(child, Layer):
            yield child
            yield from layers_below(child)


def finish_loading(layer: LayerTree, finished: Callable[[], None] = lambda: None) -> None:
    """Calls `Layer.finish_loading` of a layer and of all below it, from the top down: a layer may change what
    those below it pack. `finished` is called after each."""
    layer.finish_loading()
    finished()
    for _, child in layer.children():
        if isinstance(child, Layer):
            finish_loading(child, finished)


def even_shard(full: int, ranks: RankGroup, what: str, flag: str = "--tp-size") -> Shard:
    """An equal part of a dimension for each rank. Raises ModelError, naming `what` and `flag`, where the
    number of ranks does not divide `full`."""
    if full % ranks.size:
        raise ModelError(
            f"{flag} {ranks.size} does not divide the model's {what} ({full}); choose a divisor of it"
        )
    size = full // ranks.size
    return Shard(full, ranks.rank * size, size)


def unit_shard(full: int, ranks: RankGroup, what: str) -> Shard:
    """Whole units, as heads, that may be one fewer on the last ranks. Raises ModelError, naming `what`, where
    a rank would have none."""
    return _shard(full, even_part(full, ranks.size, ranks.rank), ranks, what)


def channel_shard(full: int, ranks: RankGroup, what: str) -> Shard:
    """Channels, as of an inner dimension (see shares.channel_part). Raises ModelError as `unit_shard`."""
    return _shard(full, channel_part(full, ranks.size, ranks.rank), ranks, what)


def head_shards(
    num_heads: int, num_kv_heads: int, ranks: RankGroup, what: str = "attention heads"
) -> tuple[Shard, Shard]:
    """Query heads and key/value heads (see shares.head_parts). Raises ModelError as `unit_shard`."""
    queries, kv = head_parts(num_heads, num_kv_heads, ranks.size, ranks.rank)
    return _shard(num_heads, queries, ranks, what), Shard(num_kv_heads, *kv)


def _shard(full: int, part: Part, ranks: RankGroup, what: str) -> Shard:
    if full < ranks.size:
        raise ModelError(
            f"--tp-size {ranks.size} leaves ranks without any of the model's {what} ({full}); lower it"
        )
    return Shard(full, *part)


def scaled_shard(shard: Shard, unit: int) -> Shard:
    """The shard of a dimension that has `unit` entries for each entry of `shard`."""
    return Shard(shard.full * unit, shard.start * unit, shard.size * unit)
