"""Tensors of GGUF files as the loader reads them: numbers where they are indexed, or rows of blocks."""

import math
import mmap
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from runtime.devices.packed import GgmlPart
from runtime.errors import ModelError
from runtime.layers.quantization.ggml import dequantize_rows
from runtime.layers.weight import Index
from runtime.models.config.gguf.tensors import Source
from runtime.models.config.gguf.types import BY_NAME, PLAIN
from runtime.regular_file import open_regular

NUMBERS_AT_ONCE = 1 << 22  # that are float32 before they are converted
DTYPE_NAMES = {"F32": "F32", "F64": "F64", "F16": "F16", "BF16": "BF16"}


def mapped_octets(path: str | Path) -> Tensor:
    """The bytes of a file, uint8 [N], in pages of the page cache. Raises OSError."""
    with open_regular(path) as file:
        # private and writable: torch wants memory that could be written, and nothing writes to it
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        data = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(data, dtype=torch.uint8)


class GgmlRows:
    """A TensorReader (layers/weight.py) of a tensor, or of one expert's rows of it. What it reads is float32
    for types of codes, else the type's own dtype."""

    def __init__(self, source: Source, octets: Tensor) -> None:
        """`octets`: those of the file that has the tensor. Raises ModelError for rows that are no heads."""
        tensor = source.tensor
        self.type, self.shape, self.less = tensor.type, source.shape, source.less
        row_numbers = math.prod(source.shape[1:])
        row_bytes = row_numbers // BY_NAME[tensor.type].block * BY_NAME[tensor.type].num_bytes
        whole = octets[tensor.offset : tensor.offset + tensor.num_bytes].view(-1, row_bytes)
        self.rows = whole[source.first_row : source.first_row + source.shape[0]]
        self.order: Tensor | None = None  # int64: where the file has each row
        if source.heads:
            if source.shape[0] % (2 * source.heads):
                raise ModelError(
                    f"{tensor.name} has {source.shape[0]} rows, not as many for each of {source.heads} heads"
                )
            places = torch.arange(source.shape[0]).view(source.heads, -1, 2)
            self.order = places.transpose(1, 2).reshape(-1)

    def get_shape(self) -> list[int]:
        """The shape, the longest stride first."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The name of the dtype that is read."""
        return DTYPE_NAMES.get(self.type, "F32")

    def __getitem__(self, index: Index) -> Tensor:
        """Reads this part, dequantized."""
        rows, columns = _slices(index)
        found = self._numbers(self._places(rows))
        return self._shaped(found, columns)

    def _shaped(self, rows: Tensor, columns: slice) -> Tensor:
        """Rows of numbers as the tensor has them, from 1 to 3 dimensions."""
        return rows.flatten() if len(self.shape) == 1 else rows.view(-1, *self.shape[1:])[:, columns]

    def copy_to(self, target: Tensor, index: Index) -> None:
        """Reads this part into a tensor of any dtype, a few rows at a time."""
        rows, columns = _slices(index)
        places = self._places(rows)
        step = max(1, NUMBERS_AT_ONCE // max(1, math.prod(self.shape[1:])))
        for at in range(0, len(places), step):
            found = self._numbers(places[at : at + step])
            part = target[at : at + step]
            part.copy_(self._shaped(found, columns))

    def packed(self, rows: slice, columns: slice) -> GgmlPart:
        """Rows as the file has them, not copied; `columns` begin and end with blocks."""
        kind = BY_NAME[self.type]
        first, last, _ = columns.indices(self.shape[1])
        octets = slice(first // kind.block * kind.num_bytes, last // kind.block * kind.num_bytes)
        return GgmlPart(self.type, self.rows[:, octets], self._places(rows), last - first)

    def _places(self, rows: slice) -> Tensor:
        """Where the file has these rows, int64."""
        first, last, _ = rows.indices(self.shape[0])
        return torch.arange(first, last) if self.order is None else self.order[first:last]

    def _numbers(self, places: Tensor) -> Tensor:
        begin, count = int(places[0]) if len(places) else 0, len(places)
        is_line = self.order is None
        octets = self.rows[begin : begin + count] if is_line else self.rows.index_select(0, places)
        if self.type in PLAIN and not self.less:
            return octets.contiguous().view(_plain_dtype(self.type)).view(count, -1)
        found = dequantize_rows(self.type, octets)
        return found - self.less if self.less else found


def _plain_dtype(name: str) -> torch.dtype:
    return {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}[name]


def _slices(index: Index) -> tuple[slice, slice]:
    parts = index if isinstance(index, tuple) else (index,)
    whole = [slice(None) if isinstance(part, EllipsisType) else part for part in parts]
    assert all(isinstance(part, slice) for part in whole), "a GGUF tensor is read by slices"
    rows, columns = (*whole, slice(None))[:2]
    return rows, columns  # type: ignore[return-value]
