"""Tensors of GGUF files that hold what the Hugging Face layout has in another form: two tensors as one, with
inputs and outputs swapped, or blocks of MXFP4 as codes and exponents. The loader reads them by parts."""

import math
from collections.abc import Callable, Mapping
from types import EllipsisType

import torch
from torch import Tensor

from runtime.layers.quantization.ggml import dequantize_rows
from runtime.layers.weight import Index
from runtime.models.config.gguf.container import GgufTensor
from runtime.models.config.gguf.tensors import Source
from runtime.models.config.gguf.types import BY_NAME

GROUP = 32  # numbers that share an exponent of MXFP4


class JoinedRows:
    """A TensorReader (layers/weight.py) of a source that has a form. It is read unit by unit: by experts, or
    by heads."""

    def __init__(self, source: Source, octets: Mapping[str, Tensor]) -> None:
        """`octets`: the bytes of each file, by its path."""
        self._shape, self._form = source.shape, source.form
        self._first = units_of(source.tensor, octets)
        self._second = None if source.second is None else units_of(source.second, octets)
        self._types = [one.type for one in (source.tensor, source.second) if one is not None]
        self._of_unit = UNITS[source.form]
        self._rows = self._shape[0] // len(self._first)  # of the tensor that are read, in a unit

    def get_shape(self) -> list[int]:
        """The shape, the longest stride first."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The name of the dtype that is read."""
        return "U8" if self._form in ("codes", "exponents") else "F32"

    def __getitem__(self, index: Index) -> Tensor:
        """Reads this part."""
        whole = slices_of(index)
        begin, end, _ = whole[0].indices(self._shape[0])
        first, last = begin // self._rows, -(-end // self._rows)
        parts = [self._unit(unit) for unit in range(first, last)]
        joined = torch.cat(parts) if self._rows > 1 else torch.stack(parts)
        return joined[(slice(begin - first * self._rows, end - first * self._rows), *whole[1:])]

    def copy_to(self, target: Tensor, index: Index) -> None:
        """Reads this part into a tensor of any dtype, expert by expert."""
        whole = slices_of(index)
        if self._rows > 1:
            target.copy_(self[index])
            return
        for place, unit in enumerate(range(*whole[0].indices(self._shape[0]))):
            target[place].copy_(self._unit(unit)[whole[1:]])

    def _unit(self, unit: int) -> Tensor:
        """Expert or head number `unit`, in the form of the Hugging Face layout."""
        found = [self._first[unit]] if self._second is None else [self._first[unit], self._second[unit]]
        if self._form not in ("codes", "exponents"):
            found = [dequantize_rows(kind, rows) for kind, rows in zip(self._types, found, strict=True)]
        return self._of_unit(found)


def units_of(tensor: GgufTensor, octets: Mapping[str, Tensor]) -> Tensor:
    """The bytes of a tensor by unit and row, uint8 [units, rows, bytes]: rows of a matrix are units of one
    row."""
    kind = BY_NAME[tensor.type]
    whole = octets[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes]
    return whole.view(tensor.shape[0], -1, tensor.shape[-1] // kind.block * kind.num_bytes)


def slices_of(index: Index) -> tuple[slice, ...]:
    """An index as slices of the first dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    whole = [slice(None) if isinstance(part, EllipsisType) else part for part in parts]
    assert all(isinstance(part, slice) for part in whole), "a GGUF tensor is read by slices"
    return tuple(whole)  # type: ignore[arg-type]


def latent(parts: list[Tensor]) -> Tensor:
    """From latents to a head's keys [rank, keys] and values [values, rank] -> [keys + values, rank]."""
    keys, values = parts
    return torch.cat((keys.t(), values))


def alternating(parts: list[Tensor]) -> Tensor:
    """Rows of gate and up, [inner, ...] each, in turn; of the way down they stay."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, dim=1).flatten(0, 1)


def swapped(parts: list[Tensor]) -> Tensor:
    """[outputs, inputs] of an expert -> [inputs, outputs], with gate and up in turn."""
    return alternating(parts).t()


def bias(parts: list[Tensor]) -> Tensor:
    """[1, outputs] of an expert -> [outputs], with gate and up in turn."""
    return alternating([part[0] for part in parts])


def codes(parts: list[Tensor]) -> Tensor:
    """Blocks of MXFP4, uint8 [outputs, bytes] -> numbers of 4 bits, uint8 [outputs, groups, 16]: neighbours
    in a byte, where a block has numbers i and i + 16 in one."""
    octets = blocks(parts)[..., 1:]
    numbers = torch.cat((octets & 15, octets >> 4), dim=-1)
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def exponents(parts: list[Tensor]) -> Tensor:
    """Blocks of MXFP4, uint8 [outputs, bytes] -> exponents, uint8 [outputs, groups]."""
    return blocks(parts)[..., 0]


def blocks(parts: list[Tensor]) -> Tensor:
    """Rows of bytes, with gate and up in turn, as blocks: uint8 [outputs, groups, 17]."""
    return alternating(parts).unflatten(-1, (-1, BY_NAME["MXFP4"].num_bytes))


UNITS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "latent": latent,
    "stack": swapped,
    "bias": bias,
    "codes": codes,
    "exponents": exponents,
}


def num_bytes(source: Source) -> int:
    """Bytes in the file of what a source holds."""
    whole = sum(one.num_bytes for one in (source.tensor, source.second) if one is not None)
    if not source.form:
        return whole * math.prod(source.shape) // math.prod(source.tensor.shape)
    shares = {"codes": 16 / 17, "exponents": 1 / 17}
    return int(whole * shares.get(source.form, 1.0))
