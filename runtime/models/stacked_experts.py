"""Stacked experts: one tensor of all experts of a layer. The loader gets them expert by expert, and module by
module.

  experts.gate_up_proj  [experts, 2 * inner, hidden] experts.N.gate_proj.weight above experts.N.up_proj.weight
  experts.down_proj     [experts, hidden, inner]      experts.N.down_proj.weight

transformers 5 may write any model so; Granite MoE has other names for the two, Step 3.5 has gates and ups
apart, and stacks scales of 8-bit floats alike, and Llama 4 has inputs before outputs. The shared expert of
Granite is a matrix of two modules. DBRX has the experts of a layer one below the other, [experts * inner,
hidden], also those of the way down, whose weights are the other way round.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from runtime.layers.weight import TensorReader
from runtime.models.checkpoint import TensorSlice
from runtime.models.fused_tensors import Rows


class Stack(NamedTuple):
    """Where the parts of a stacked tensor belong."""

    parent: str  # name of the experts' list
    parts: tuple[str, ...]  # modules of an expert, one below the other
    leaf: str = "weight"


# end of a stacked tensor's name -> its parts
STACKS = {
    "experts.gate_up_proj": Stack("experts", ("gate_proj", "up_proj")),
    "experts.up_proj": Stack("experts", ("up_proj",)),  # of experts without gates
    "experts.down_proj": Stack("experts", ("down_proj",)),
    **{
        f"moe.{part}.{leaf}": Stack("moe.experts", (part,), leaf)
        for part in ("gate_proj", "up_proj", "down_proj")
        for leaf in ("weight", "weight_scale_inv")
    },
    "block_sparse_moe.input_linear.weight": Stack("block_sparse_moe.experts", ("gate_proj", "up_proj")),
    "block_sparse_moe.output_linear.weight": Stack("block_sparse_moe.experts", ("down_proj",)),
}
# end of a fused matrix's name -> its modules
FUSED = {
    "shared_mlp.input_linear.weight": ("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight"),
    "shared_mlp.output_linear.weight": ("shared_mlp.down_proj.weight",),
}
# end of the name of a matrix of experts one below the other -> module of each, and whether its weights are
# [inputs, outputs]
BELOW = {
    "experts.mlp.w1": ("gate_proj", False),
    "experts.mlp.v1": ("up_proj", False),
    "experts.mlp.w2": ("down_proj", True),
}


class ExpertRows:
    """A TensorReader of rows [begin, begin + size) of one expert in a three-dimensional tensor."""

    def __init__(
        self, reader: TensorReader, expert: int, begin: int, size: int, *, is_transposed: bool = False
    ) -> None:
        """`is_transposed`: the tensor is [experts, columns, rows]."""
        self._reader = reader
        self._expert = expert
        self._begin = begin
        self._size = size
        self._is_transposed = is_transposed

    def get_shape(self) -> list[int]:
        """[size, columns]."""
        return [self._size, self._reader.get_shape()[1 if self._is_transposed else 2]]

    def get_dtype(self) -> str:
        """The dtype of the stacked tensor."""
        name: str = self._reader.get_dtype()
        return name

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        first, last, _ = slice(None).indices(self._size) if rows is ... else rows.indices(self._size)
        own = slice(self._begin + first, self._begin + last)
        if self._is_transposed:
            return self._reader[self._expert, columns, own].t()
        return self._reader[self._expert, own, columns]


class RowsBelow:
    """A TensorReader of one of the matrices that stand one below the other in a tensor."""

    def __init__(self, reader: TensorReader, begin: int, size: int, *, is_transposed: bool) -> None:
        """`is_transposed`: the matrix is read with its columns as rows."""
        self._rows = Rows(reader, [(begin, begin + size)])
        self._is_transposed = is_transposed

    def get_shape(self) -> list[int]:
        """The shape of the matrix."""
        shape = self._rows.get_shape()
        return shape[::-1] if self._is_transposed else shape

    def get_dtype(self) -> str:
        """The dtype of the whole tensor."""
        return self._rows.get_dtype()

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        rows = slice(None) if rows is ... else rows
        return self._rows[columns, rows].t() if self._is_transposed else self._rows[rows, columns]


def unstacked(
    sources: Iterator[TensorSlice], hidden: int, *, is_transposed: bool = False, num_experts: int = 0
) -> Iterator[TensorSlice]:
    """All tensors, with stacks of experts taken apart. `is_transposed`: they are [experts, inputs, outputs],
    where their shape does not say otherwise; `hidden`: width of the model."""
    for source in sources:
        reader = source.reader
        below = next((end for end in BELOW if source.name.endswith("." + end)), None)
        if below is not None and num_experts:
            yield from _below(source, below, num_experts)
            continue
        fused = next((end for end in FUSED if source.name.endswith("." + end)), None)
        if fused is not None:
            yield from _unfused(source, fused)
            continue
        end = next((end for end in STACKS if source.name.endswith("." + end)), None)
        if end is None or len(reader.get_shape()) != 3:
            yield source
            continue
        stack, prefix = STACKS[end], source.name.removesuffix(end)
        count, rows, columns = reader.get_shape()
        inputs = hidden if len(stack.parts) == 2 else rows + columns - hidden
        flips = is_transposed and (rows == columns or columns != inputs)
        size = (columns if flips else rows) // len(stack.parts)
        for expert in range(count):
            for i, name in enumerate(stack.parts):
                yield TensorSlice(
                    f"{prefix}{stack.parent}.{expert}.{name}.{stack.leaf}",
                    source.file,
                    ExpertRows(reader, expert, i * size, size, is_transposed=flips),
                )


def _below(source: TensorSlice, end: str, num_experts: int) -> Iterator[TensorSlice]:
    (module, is_transposed), prefix = BELOW[end], source.name.removesuffix(end)
    size = source.reader.get_shape()[0] // num_experts
    for expert in range(num_experts):
        rows = RowsBelow(source.reader, expert * size, size, is_transposed=is_transposed)
        yield TensorSlice(f"{prefix}experts.{expert}.{module}.weight", source.file, rows)


def _unfused(source: TensorSlice, end: str) -> Iterator[TensorSlice]:
    reader, names = source.reader, FUSED[end]
    size = reader.get_shape()[0] // len(names)
    for i, name in enumerate(names):
        rows = Rows(reader, [(i * size, (i + 1) * size)])
        yield TensorSlice(source.name.removesuffix(end) + name, source.file, rows)
