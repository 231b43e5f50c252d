"""The safetensors files of a model folder: which tensors there are, and slices of them without reading the
rest.

Format: https://huggingface.co/docs/safetensors. A sharded checkpoint has an index, which says for each tensor
which file holds it.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from runtime.errors import ModelError
from runtime.layers.weight import TensorReader
from runtime.regular_file import check_regular, read_regular

INDEX_FILE = "model.safetensors.index.json"


class IndexFile(Struct, frozen=True):
    """model.safetensors.index.json: tensor name -> file name."""

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The files that together hold the weights. Raises ModelError where there are none or one of them is
    missing."""
    if (folder / INDEX_FILE).is_file():
        try:
            index = msgspec.json.decode(read_regular(folder / INDEX_FILE), type=IndexFile)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise ModelError(
                f"{INDEX_FILE} cannot be read: {error}; restore the file from the model's source"
            ) from None
        names = sorted(set(index.weight_map.values()))
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{INDEX_FILE} names {missing[0]} ({len(missing)} of {len(names)} files are missing); "
                "finish the download of the model"
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = [pattern for pattern in ("*.bin", "*.pth", "*.gguf") if any(folder.glob(pattern))]
        found = f"only {others[0]} files, which are not read" if others else "no weights"
        raise ModelError(
            f"{folder} has {found}; get the model's *.safetensors, or use --load-format dummy for random "
            "weights"
        )
    return files


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor in a file. The names of safetensors' dtypes have the bits of an element (F8_E4M3,
    BF16), except BOOL, which is stored as bytes."""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


class TensorSlice:
    """A tensor in an open file. `reader`: safetensors' own slice object, which reads when it is indexed."""

    def __init__(self, name: str, file: str, reader: TensorReader) -> None:
        self.name = name
        self.file = file
        self.reader = reader

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
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
                        raise ModelError(
                            f"tensor {name} is in both {seen[name]} and {path.name}; "
                            "remove the file that does not belong to the model"
                        )
                    seen[name] = path.name
                    yield TensorSlice(name, path.name, file.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} is damaged or cut short ({error}); download it again") from None
