"""Weights that a checkpoint has as [inputs, outputs] (GPT-2): the loader gets them as [outputs, inputs]."""

from collections.abc import Iterator

from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.weight import Index, TensorReader
from runtime.models.checkpoint import TensorSlice


class Transposed:
    """A TensorReader of a matrix with rows and columns exchanged."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def get_shape(self) -> list[int]:
        """[outputs, inputs]."""
        return self._reader.get_shape()[::-1]

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        name: str = self._reader.get_dtype()
        return name

    def __getitem__(self, index: Index) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        rows = slice(None) if rows is ... else rows
        return self._reader[columns, rows].t()


def untransposed(sources: Iterator[TensorSlice], modules: tuple[str, ...]) -> Iterator[TensorSlice]:
    """All tensors, with the weights of these modules turned. Raises ModelError for one that is quantized."""
    for source in sources:
        path, _, leaf = source.name.rpartition(".")
        if path.rpartition(".")[2] not in modules or leaf == "bias":
            yield source
            continue
        if leaf != "weight":
            raise ModelError(
                f"{source.name} in {source.file}: quantised weights of this model are not supported; use the "
                "plain version of the model"
            )
        yield TensorSlice(source.name, source.file, Transposed(source.reader), source.num_bytes)
