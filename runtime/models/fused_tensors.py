"""Tensors of a checkpoint that fuse several modules: the loader gets them module by module, so that each can
be sharded over ranks."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.weight import TensorReader
from runtime.models.checkpoint import TensorSlice


class Fused(NamedTuple):
    """The modules in a fused one: in each of `groups`, rows of the modules one below the other, in shares."""

    modules: tuple[tuple[str, int], ...]  # name, and its share of the rows of a group
    groups: int = 1


# last name of a fused module -> what it has
FusedModules = Mapping[str, Fused]


def equal_parts(*names: str) -> Fused:
    """Modules of one size, one below the other."""
    return Fused(tuple((name, 1) for name in names))


class Rows:
    """A TensorReader of ranges of rows of a tensor."""

    def __init__(self, reader: TensorReader, ranges: list[tuple[int, int]]) -> None:
        self._reader = reader
        self._ranges = ranges
        self._size = sum(end - begin for begin, end in ranges)

    def get_shape(self) -> list[int]:
        """The shape of the rows."""
        return [self._size, *self._reader.get_shape()[1:]]

    def get_dtype(self) -> str:
        """The dtype of the whole tensor."""
        name: str = self._reader.get_dtype()
        return name

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        first, last, _ = slice(None).indices(self._size) if rows is ... else rows.indices(self._size)
        found, offset = [], 0
        for begin, end in self._ranges:
            own = slice(begin + max(first - offset, 0), min(end, begin + last - offset))
            if own.start < own.stop:
                found.append(self._reader[(own, *others)] if others else self._reader[own])
            offset += end - begin
        if not found:
            return self._reader[(slice(0, 0), *others)] if others else self._reader[slice(0, 0)]
        return found[0] if len(found) == 1 else torch.cat(found)


def split(sources: Iterator[TensorSlice], fused: FusedModules) -> Iterator[TensorSlice]:
    """All tensors, with fused modules taken apart. Raises ModelError for one that is quantized."""
    for source in sources:
        path, _, leaf = source.name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if module not in fused:
            yield source
            continue
        if leaf not in ("weight", "bias"):
            raise ModelError(
                f"{source.name} in {source.file}: {module} holds several modules and is quantised, which is "
                "not supported; use the plain version of the model"
            )
        modules, groups = fused[module]
        shares = sum(share for _, share in modules)
        unit = source.reader.get_shape()[0] // (groups * shares)
        offset = 0
        for name, share in modules:
            begins = [(group * shares + offset) * unit for group in range(groups)]
            rows = Rows(source.reader, [(begin, begin + share * unit) for begin in begins])
            yield TensorSlice(
                f"{parent}.{name}.{leaf}", source.file, rows, source.num_bytes * share // shares
            )
            offset += share
