"""The safetensors files of a model folder, by their names and headers: torch-free, and no tensor is read.

A file begins with eight bytes, the length of its header, and the header, JSON: for each tensor its type, its
shape, and where its bytes are behind the header (https://huggingface.co/docs/safetensors). A sharded
checkpoint has an index, which says for each tensor which file holds it.
"""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.gguf.container import is_gguf, read_gguf, split_paths
from runtime.models.config.gguf.tensors import sources
from runtime.regular_file import open_regular, read_regular

INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class IndexFile(Struct, frozen=True):
    """model.safetensors.index.json: tensor name -> file name."""

    weight_map: dict[str, str]


class StoredTensor(Struct, frozen=True):
    """A tensor by a file's header."""

    dtype: str  # as safetensors names it: BF16, F8_E4M3 ...
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # bytes behind the header: begin and end

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.data_offsets[1] - self.data_offsets[0]


def weight_files(folder: Path) -> list[Path]:
    """The files that together hold the weights; of a GGUF file itself and its other parts. Raises ModelError
    where there are none or one of them is missing."""
    if is_gguf(folder):
        return split_paths(folder)
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
        others = [pattern for pattern in ("*.bin", "*.pth") if any(folder.glob(pattern))]
        found = f"only {others[0]} files, which are not read" if others else "no weights"
        raise ModelError(
            f"{folder} has {found}; get the model's *.safetensors, or use --load-format dummy for random "
            "weights"
        )
    return files


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Raises ModelError for a file that is damaged or cut short."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in header.items()}
        end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
        if LENGTH_BYTES + length + end != size:
            raise ValueError(f"it has {size} bytes instead of {LENGTH_BYTES + length + end}")
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ModelError(f"{path.name} is damaged or cut short ({error}); download it again") from None
    return tensors


def check_weight_files(folder: Path) -> None:
    """Raises ModelError where files are missing or damaged, or a tensor is in two of them."""
    if is_gguf(folder):
        list(sources(read_gguf(folder)))
        return
    seen: dict[str, str] = {}
    for path in weight_files(folder):
        for name in read_header(path):
            if name in seen:
                raise ModelError(twice(name, seen[name], path.name))
            seen[name] = path.name


def twice(tensor: str, first: str, second: str) -> str:
    """What is wrong with a tensor that is in two files."""
    return (
        f"tensor {tensor} is in both {first} and {second}; remove the file that does not belong to the model"
    )
