"""The weight files of a model folder, by their names and headers: torch-free, and no tensor is read.

--load-format says which files hold the weights (`stored_as`):

    safetensors     *.safetensors (https://huggingface.co/docs/safetensors)
    pt, npcache     *.bin, *.pt, *.pth of torch.save
    mistral         consolidated*.safetensors with params.json, as Mistral AI publishes models
    sharded_state   model-rank-R-part-P.safetensors: what each rank reads, in files of its own
    gguf            one GGUF file, or a split one

A safetensors file begins with eight bytes, the length of its header, and the header, JSON: for each tensor
its type, its shape, and where its bytes are behind the header. A sharded checkpoint has an index, which says
for each tensor which file holds it.
"""

import math
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile, ZipFile

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.gguf.container import is_gguf, read_gguf, split_paths
from runtime.models.config.gguf.tensors import sources
from runtime.regular_file import open_regular, read_regular

INDEX_FILE = "model.safetensors.index.json"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ZIP_MAGIC, PICKLE_MAGIC = b"PK\x03\x04", b"\x80"
# pickled files of a model folder that hold no weights
NO_WEIGHTS = ("training_args*", "optimizer*", "scheduler*", "scaler*", "rng_state*", "tokenizer*")
SHARD_FILE = re.compile(r"model-rank-(\d+)-part-(\d+)\.safetensors")

StoredAs = Literal["safetensors", "pt", "npcache", "mistral", "sharded_state", "gguf"]
# choices of --load-format that differ from another one in how files are read, not in which
READ_AS = {
    "layered": "auto",
    "bitsandbytes": "auto",
    "remote": "auto",
    "remote_instance": "auto",
    "fastsafetensors": "safetensors",
    "runai_streamer": "safetensors",
}


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


class Header(Struct, frozen=True):
    """The header of a safetensors file."""

    tensors: dict[str, StoredTensor]  # by name, in the order of their bytes
    begin: int  # where the bytes of the tensors begin in the file
    metadata: dict[str, str]


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor in a file. The names of safetensors' dtypes have the bits of an element (F8_E4M3,
    BF16), except BOOL, which is stored as bytes."""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


def stored_as(folder: Path, load_format: str = "auto") -> StoredAs:
    """What the weights of a model are stored as: `load_format` (never dummy), for "auto" what is there."""
    if is_gguf(folder):
        return "gguf"
    kind = READ_AS.get(load_format, load_format)
    if kind != "auto":
        return kind  # type: ignore[return-value]
    names = [path.name for path in folder.glob("*.safetensors")]
    if any(SHARD_FILE.fullmatch(name) for name in names):
        return "sharded_state"
    if any(not name.startswith("consolidated") for name in names):
        return "safetensors"
    if names:
        return "mistral" if (folder / "params.json").is_file() else "safetensors"
    return "pt" if _pickled(folder) else "safetensors"


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files that together hold the weights, of all ranks; of a GGUF file itself and its other parts.
    Raises ModelError where there are none or one of them is missing."""
    match stored_as(folder, load_format):
        case "gguf":
            return split_paths(folder)
        case "pt" | "npcache":
            return _indexed(folder, TORCH_INDEX_FILE) or _pickled(folder) or _none(folder, "*.bin")
        case "mistral":
            names = ("consolidated.safetensors.index.json", "consolidated*.safetensors")
            return _indexed(folder, names[0]) or sorted(folder.glob(names[1])) or _none(folder, names[1])
        case "sharded_state":
            files = sorted(path for path in folder.iterdir() if SHARD_FILE.fullmatch(path.name))
            return files or _none(folder, "model-rank-*-part-*.safetensors")
        case _:
            if files := _indexed(folder, INDEX_FILE):
                return files
            if (folder / "model.safetensors").is_file():
                return [folder / "model.safetensors"]
            files = sorted(folder.glob("*.safetensors"))
            plain = [path for path in files if not path.name.startswith("consolidated")]
            return plain or files or _none(folder, "*.safetensors")


def _indexed(folder: Path, index_file: str) -> list[Path]:
    """The files that an index names; none without it."""
    if not (folder / index_file).is_file():
        return []
    try:
        index = msgspec.json.decode(read_regular(folder / index_file), type=IndexFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(
            f"{index_file} cannot be read: {error}; restore the file from the model's source"
        ) from None
    names = sorted(set(index.weight_map.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{index_file} names {missing[0]} ({len(missing)} of {len(names)} files are missing); "
            "finish the download of the model"
        )
    return [folder / name for name in names]


def _pickled(folder: Path) -> list[Path]:
    """Files of torch.save with weights: all with the first suffix that there is any of."""
    for pattern in ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth"):
        paths = sorted(folder.glob(pattern))
        files = [path for path in paths if not any(fnmatch(path.name, name) for name in NO_WEIGHTS)]
        if files:
            return files
    return []


def _none(folder: Path, wanted: str) -> list[Path]:
    others = [p for p in ("*.safetensors", "*.bin", "*.pth", "*.gguf") if p != wanted and any(folder.glob(p))]
    found = f"no {wanted}, but {others[0]} files" if others else "no weights"
    raise ModelError(
        f"{folder} has {found}; get the model's {wanted}, leave --load-format out to take what is there, or "
        "use --load-format dummy for random weights"
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises ModelError for a file that is damaged or cut short."""
    return read_whole_header(path).tensors


def read_whole_header(path: Path) -> Header:
    """The header of a safetensors file. Raises ModelError as `read_header`."""
    try:
        with open_regular(path) as file:
            return header_of(file)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise damaged(path, error) from None


def damaged(path: Path, why: object) -> ModelError:
    """The error for a file that cannot be read as what it should be."""
    return ModelError(f"{path.name} is damaged or cut short ({why}); download it again")


def header_of(file: BufferedReader) -> Header:
    """The header of an open file. Raises OSError, ValueError and RecursionError for one that is damaged: the
    tensors fill the file without gaps, each with as many bytes as its shape and dtype need."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise ValueError("its header is longer than the file")
    entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    metadata = entries.pop("__metadata__", None)
    tensors = {name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in entries.items()}
    tensors = dict(sorted(tensors.items(), key=lambda entry: entry[1].data_offsets))
    begin, end = LENGTH_BYTES + length, 0
    for name, tensor in tensors.items():
        if min(tensor.shape, default=0) < 0 or tensor.num_bytes != stored_bytes(tensor.shape, tensor.dtype):
            raise ValueError(
                f"its tensor {name}, {tensor.dtype} {list(tensor.shape)}, has {tensor.num_bytes} bytes"
            )
        if tensor.data_offsets[0] != end:
            raise ValueError(f"its tensor {name} begins at {tensor.data_offsets[0]} instead of {end}")
        end = tensor.data_offsets[1]
    if begin + end != size:
        raise ValueError(f"it has {size} bytes instead of {begin + end}")
    named = {} if metadata is None else msgspec.json.decode(metadata, type=dict[str, str])
    return Header(tensors, begin, named)


def check_weight_files(folder: Path, load_format: str = "auto") -> None:
    """Raises ModelError where files are missing or damaged, or a tensor is in two of them."""
    kind = stored_as(folder, load_format)
    if kind == "gguf":
        list(sources(read_gguf(folder)))
        return
    seen: dict[str, str] = {}
    for path in weight_files(folder, load_format):
        if kind in ("pt", "npcache"):
            check_pickled(path)
            continue
        headers = read_header(path)
        for name in () if kind == "sharded_state" else headers:
            if name in seen:
                raise ModelError(twice(name, seen[name], path.name))
            seen[name] = path.name


def check_pickled(path: Path) -> bool:
    """Looks at a file of torch.save without unpickling it. -> whether it is a zip file, as torch writes since
    1.6. Raises ModelError for what is no such file, or one that is cut short."""
    try:
        with open_regular(path) as file:
            head = file.read(4)
            if head != ZIP_MAGIC:
                if not head.startswith(PICKLE_MAGIC):
                    raise ValueError("it is no file of torch.save")
                return False
            with ZipFile(file) as archive:
                if not any(name.endswith("data.pkl") for name in archive.namelist()):
                    raise ValueError("it is a zip file that torch.save did not write")
                return True
    except (OSError, ValueError, BadZipFile, NotImplementedError) as error:
        raise damaged(path, error) from None


def twice(tensor: str, first: str, second: str) -> str:
    """What is wrong with a tensor that is in two files."""
    return (
        f"tensor {tensor} is in both {first} and {second}; remove the file that does not belong to the model"
    )
