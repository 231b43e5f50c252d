"""The tensors of safetensors and GGUF files: which there are, and slices of them without reading the rest."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.quantization.ggml_rows import GgmlRows, mapped_octets
from runtime.layers.weight import TensorReader
from runtime.models.config.gguf.container import read_gguf
from runtime.models.config.gguf.tensors import sources
from runtime.models.config.weight_files import twice
from runtime.regular_file import check_regular


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor in a file. The names of safetensors' dtypes have the bits of an element (F8_E4M3,
    BF16), except BOOL, which is stored as bytes."""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


class TensorSlice:
    """A tensor in an open file. `reader`: safetensors' own slice object, which reads when it is indexed."""

    def __init__(self, name: str, file: str, reader: TensorReader, num_bytes: int | None = None) -> None:
        """`num_bytes`: those in the file, where they do not follow from shape and dtype."""
        self.name = name
        self.file = file
        self.reader = reader
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        if self._num_bytes is not None:
            return self._num_bytes
        return stored_bytes(self.reader.get_shape(), self.reader.get_dtype())


def tensors(files: list[Path]) -> Iterator[TensorSlice]:
    """All tensors, file after file, each valid until the next is requested. Raises ModelError for a damaged
    file and for a name that occurs twice."""
    seen: dict[str, str] = {}
    for path in files:
        try:
            check_regular(path)
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    if name in seen:
                        raise ModelError(twice(name, seen[name], path.name))
                    seen[name] = path.name
                    yield TensorSlice(name, path.name, file.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} is damaged or cut short ({error}); download it again") from None


def gguf_tensors(path: Path) -> Iterator[TensorSlice]:
    """All tensors of a GGUF checkpoint, under their names in the Hugging Face layout. Raises ModelError."""
    octets: dict[str, Tensor] = {}
    for source in sources(read_gguf(path)):
        stored = source.tensor
        if stored.path not in octets:
            octets[stored.path] = mapped_octets(stored.path)
        reader = GgmlRows(source, octets[stored.path])
        num_bytes = stored.num_bytes * math.prod(source.shape) // math.prod(stored.shape)
        yield TensorSlice(source.name, Path(stored.path).name, reader, num_bytes)
