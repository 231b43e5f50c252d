"""Tensors of a checkpoint that fuse several modules of one size: the loader gets them module by module, so
that each can be sharded over ranks."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from runtime.layers.weight import TensorReader
from runtime.models.checkpoint import TensorSlice

# last name of a fused module -> the modules that it has, one below the other
FusedModules = Mapping[str, tuple[str, ...]]


class Rows:
    """A TensorReader of rows [begin, begin + size) of a tensor."""

    def __init__(self, reader: TensorReader, begin: int, size: int) -> None:
        self._reader = reader
        self._begin = begin
        self._size = size

    def get_shape(self) -> list[int]:
        """The shape of the rows."""
        return [self._size, *self._reader.get_shape()[1:]]

    def get_dtype(self) -> str:
        """The dtype of the whole tensor."""
        name: str = self._reader.get_dtype()
        return name

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        first, last, _ = rows.indices(self._size)
        own = slice(self._begin + first, self._begin + last)
        return self._reader[(own, *others)] if others else self._reader[own]


def split(sources: Iterator[TensorSlice], fused: FusedModules) -> Iterator[TensorSlice]:
    """All tensors, with fused modules taken apart."""
    for source in sources:
        path, _, leaf = source.name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if module not in fused:
            yield source
            continue
        names = fused[module]
        size = source.reader.get_shape()[0] // len(names)
        for i, name in enumerate(names):
            rows = Rows(source.reader, i * size, size)
            yield TensorSlice(f"{parent}.{name}.{leaf}", source.file, rows, source.num_bytes // len(names))
