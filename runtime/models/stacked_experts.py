"""Stacked experts, as transformers 5 may write them: one tensor of all experts of a layer. The loader gets
them expert by expert.

  experts.gate_up_proj  [experts, 2 * inner, hidden] experts.N.gate_proj.weight above experts.N.up_proj.weight
  experts.down_proj     [experts, hidden, inner]      experts.N.down_proj.weight
"""

from collections.abc import Iterator

from torch import Tensor

from runtime.layers.weight import TensorReader
from runtime.models.checkpoint import TensorSlice

STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ExpertRows:
    """A TensorReader of rows [begin, begin + size) of one expert in a three-dimensional tensor."""

    def __init__(self, reader: TensorReader, expert: int, begin: int, size: int) -> None:
        self._reader = reader
        self._expert = expert
        self._begin = begin
        self._size = size

    def get_shape(self) -> list[int]:
        """[size, columns]."""
        return [self._size, self._reader.get_shape()[2]]

    def get_dtype(self) -> str:
        """The dtype of the stacked tensor."""
        name: str = self._reader.get_dtype()
        return name

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        first, last, _ = rows.indices(self._size)
        return self._reader[self._expert, self._begin + first : self._begin + last, columns]


def unstacked(sources: Iterator[TensorSlice]) -> Iterator[TensorSlice]:
    """All tensors, with stacks of experts taken apart."""
    for source in sources:
        reader = source.reader
        parent, _, leaf = source.name.rpartition(".")
        if not (parent.endswith(".experts") and leaf in STACKS and len(reader.get_shape()) == 3):
            yield source
            continue
        names, (num_experts, num_rows, _) = STACKS[leaf], reader.get_shape()
        size = num_rows // len(names)
        for expert in range(num_experts):
            for i, name in enumerate(names):
                yield TensorSlice(
                    f"{parent}.{expert}.{name}.weight",
                    source.file,
                    ExpertRows(reader, expert, i * size, size),
                )
