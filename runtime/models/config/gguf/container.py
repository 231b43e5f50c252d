"""GGUF files: metadata, and where the tensors lie (docs/gguf.md of https://github.com/ggml-org/ggml).

    magic, version, number of tensors, number of keys
    keys: name, type, value (an array has the type of its items, and their number)
    tensors: name, number of dimensions, dimensions (the shortest stride first), type, offset
    padding to the alignment, then the tensors' bytes

Numbers are little-endian. Each count and length is compared with the bytes that are left before anything is
made of it, so a damaged file costs no more memory than it has bytes.
"""

import mmap
import os
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.gguf.types import TYPES
from runtime.regular_file import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
MAX_ITEMS = 1 << 23  # of all arrays of a file
MAX_TENSORS = 1 << 20
MAX_KEYS = 1 << 16
MAX_TEXT = 1 << 24  # bytes of a string
MAX_DIMENSIONS = 4
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)

TEXT, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Number = int | float | bool


class Texts(Struct, frozen=True):
    """An array of strings, which are read on demand: a vocabulary has hundreds of thousands."""

    path: str
    offset: int  # of the first string's length
    count: int

    def read(self) -> list[str]:
        """The strings. What is not UTF-8 is replaced. Raises OSError."""
        found = []
        with open_regular(self.path) as file, _mapped(file.fileno()) as data:
            at = self.offset
            for _ in range(self.count):
                end = at + 8 + int.from_bytes(data[at : at + 8], "little")
                found.append(data[at + 8 : end].decode("utf-8", "replace"))
                at = end
        return found


Value = Number | str | tuple[Number, ...] | Texts


class GgufTensor(Struct, frozen=True):
    """A tensor by a file's header."""

    name: str
    path: str
    shape: tuple[int, ...]  # the longest stride first, as torch has it
    type: str  # a name of types.py
    offset: int  # in the file
    num_bytes: int


class Gguf(Struct, frozen=True):
    """A checkpoint: the metadata of its first file, and the tensors of all."""

    paths: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def is_gguf(path: str | Path) -> bool:
    """Whether a model's path is a GGUF file, and no folder."""
    path = Path(path)
    return path.suffix.lower() == ".gguf" and path.is_file()


def find_gguf(folder: Path) -> Path | None:
    """The one GGUF model of a folder: a file, or the first of a split one; None: there is none. Files of
    image encoders (mmproj) do not count. Raises ModelError where there are several models."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    models = [name for name in names if "mmproj" not in name.lower()]
    firsts = [name for name in models if (split := SPLIT.fullmatch(name)) is None or int(split[2]) == 1]
    if len(firsts) > 1:
        raise ModelError(
            f"{folder} has {len(firsts)} GGUF models ({', '.join(firsts[:4])} ...); give one of the files as "
            "--model-path"
        )
    if models and not firsts:
        raise ModelError(
            f"{folder} has {models[0]}, and not the first file of that split model; finish the download"
        )
    return folder / firsts[0] if firsts else None


def split_paths(path: Path) -> list[Path]:
    """The files of a model: the path alone, or all parts of a split one. Raises ModelError where one is
    missing."""
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    paths = [path.with_name(f"{split[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := next((one for one in paths if not one.is_file()), None):
        raise ModelError(f"{path.name} is one of {count} files, and {missing.name} is missing; download it")
    return paths


def read_gguf(path: str | Path) -> Gguf:
    """The headers of a model's files. The last model that was read is kept. Raises ModelError, naming the
    file and what is wrong with it."""
    paths = split_paths(Path(path))
    try:
        stamps = tuple((str(one), (stat := one.stat()).st_size, stat.st_mtime_ns) for one in paths)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check --model-path") from None
    return _read_all(stamps)


@lru_cache(maxsize=1)
def _read_all(stamps: tuple[tuple[str, int, int], ...]) -> Gguf:
    tensors: dict[str, GgufTensor] = {}
    metadata: dict[str, Value] = {}
    for index, (path, _, _) in enumerate(stamps):
        keys, found = read_header(Path(path))
        metadata = metadata or keys
        if len(stamps) > 1 and keys.get("split.count") not in (None, len(stamps)):
            raise ModelError(
                f"{Path(path).name} says that it is one of {keys['split.count']} files, and its name of "
                f"{len(stamps)}; restore the name that the file was published with"
            )
        for name, tensor in found.items():
            if name in tensors:
                raise ModelError(
                    f"tensor {name} is in both {Path(tensors[name].path).name} and {Path(path).name}; remove "
                    "the file that does not belong to the model"
                )
            tensors[name] = tensor
        assert index or metadata is keys
    return Gguf(tuple(Path(path) for path, _, _ in stamps), metadata, tensors)


def read_header(path: Path) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
    """Metadata and tensors of one file. Raises ModelError."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(4) != MAGIC:
                raise ValueError("it does not begin with GGUF")
            with _mapped(file.fileno()) as data:
                return _Header(path, data, size).read()
    except (OSError, ValueError, struct.error) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, struct.error):
            cause = "it ends within its header"
        raise ModelError(f"{path.name} is damaged or cut short ({cause}); download it again") from None


def _mapped(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


class _Header:
    """Reads one file from front to back. Raises ValueError and struct.error for what cannot be."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.at = len(MAGIC)
        self.items = 0  # of arrays, so far

    def read(self) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
        version = self.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") if isinstance(version, int) else 0
            if swapped in VERSIONS:
                raise ValueError("it is big-endian, and only little-endian files are read")
            raise ValueError(f"it has version {version}, and versions 2 and 3 are read")
        num_tensors, num_keys = self.count("tensors", MAX_TENSORS, 24), self.count("keys", MAX_KEYS, 13)
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self.text()
            metadata[key] = self.value(int(self.number("I")), key)
        entries = [self.entry() for _ in range(num_tensors)]
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"{ALIGNMENT_KEY} is {alignment!r} and no power of two")
        begin = -(-self.at // alignment) * alignment
        tensors = {tensor.name: tensor for tensor in self.placed(entries, begin, alignment)}
        if len(tensors) < len(entries):
            raise ValueError("two of its tensors have the same name")
        return metadata, tensors

    def number(self, code: str) -> Number:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = int(self.number("Q"))
        if count > most or count * least_bytes > self.size - self.at:
            raise ValueError(f"it says that it has {count} {what}, for which it is too short")
        return count

    def text(self) -> str:
        length = self.count("bytes in a name or text", MAX_TEXT, 1)
        begin, self.at = self.at, self.at + length
        return self.data[begin : self.at].decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Value:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            return self.array(int(self.number("I")), key)
        raise ValueError(f"its key {key} has the unknown type {kind}")

    def array(self, kind: int, key: str) -> Value:
        width = struct.calcsize("<" + NUMBERS[kind]) if kind in NUMBERS else 8
        count = self.count(f"items in {key}", MAX_ITEMS - self.items, width)
        self.items += count
        if kind in NUMBERS:
            values = struct.unpack_from(f"<{count}{NUMBERS[kind]}", self.data, self.at)
            self.at += count * width
            return values
        if kind != TEXT:
            raise ValueError(f"its key {key} is an array of the type {kind}, which is not known")
        begin, at, size, data = self.at, self.at, self.size, self.data
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + read_length(data, at)[0]
            if at > size:
                raise ValueError(f"a text of {key} ends behind its end")
        self.at = at
        return Texts(str(self.path), begin, count)

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name = self.text()
        num_dimensions = int(self.number("I"))
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name} has {num_dimensions} dimensions")
        shape = tuple(int(self.number("Q")) for _ in range(num_dimensions))
        return name, shape[::-1], int(self.number("I")), int(self.number("Q"))

    def placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], begin: int, alignment: int
    ) -> Iterator[GgufTensor]:
        """The tensors with their places in the file, each of which it has."""
        for name, shape, number, offset in entries:
            kind = TYPES.get(number)
            if kind is None:
                raise ValueError(f"its tensor {name} has the unknown type {number}")
            count = 1
            for size in shape:
                count *= size
                if not 0 < count <= (self.size // kind.num_bytes + 1) * kind.block:
                    raise ValueError(
                        f"its tensor {name} has the shape {list(shape)}, for which it is too short"
                    )
            if shape[-1] % kind.block:
                raise ValueError(f"its tensor {name} of {kind.name} has rows of {shape[-1]} numbers")
            num_bytes = count // kind.block * kind.num_bytes
            if offset % alignment:
                raise ValueError(f"its tensor {name} lies at {offset}, no multiple of {alignment}")
            if begin + offset + num_bytes > self.size:
                raise ValueError(
                    f"its tensor {name} ends at byte {begin + offset + num_bytes}, and the file has "
                    f"{self.size}"
                )
            yield GgufTensor(name, str(self.path), shape, kind.name, begin + offset, num_bytes)
