"""Experts as transformers 5 may write them: one tensor of all experts of a layer, given to the loader expert
by expert.

    experts.gate_up_proj  [experts, 2 * inner, hidden]   is experts.N.gate_proj.weight above experts.N.up_proj.weight
    experts.down_proj     [experts, hidden, inner]       is experts.N.down_proj.weight
"""

from collections.abc import Iterator
from typing import Any

from runtime.models.checkpoint import TensorSlice

STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Rows:
    """Rows [begin, begin + size) of entry `index` of a three-dimensional slice; reads on indexing, as
    safetensors' own do."""

    def __init__(self, raw: Any, index: int, begin: int, size: int) -> None:
        self._raw = raw
        self._index = index
        self._begin = begin
        self._size = size

    def get_shape(self) -> list[int]:
        return [self._size, self._raw.get_shape()[2]]

    def get_dtype(self) -> str:
        name: str = self._raw.get_dtype()
        return name

    def __getitem__(self, where: slice | tuple[slice, slice]) -> Any:
        rows, columns = where if isinstance(where, tuple) else (where, slice(None))
        first, last, _ = rows.indices(self._size)
        return self._raw[self._index, self._begin + first : self._begin + last, columns]


def unstacked(sources: Iterator[TensorSlice]) -> Iterator[TensorSlice]:
    """All tensors, with stacks of experts taken apart."""
    for source in sources:
        raw: Any = source.raw
        parent, _, leaf = source.name.rpartition(".")
        if not (parent.endswith(".experts") and leaf in STACKS and len(raw.get_shape()) == 3):
            yield source
            continue
        names, (num_experts, num_rows, _) = STACKS[leaf], raw.get_shape()
        size = num_rows // len(names)
        for expert in range(num_experts):
            for i, name in enumerate(names):
                yield TensorSlice(
                    f"{parent}.{expert}.{name}.weight", source.file, Rows(raw, expert, i * size, size)
                )
