"""Tensors of safetensors files, read in pieces by several threads at once to where they are needed.

What a rank needs of a tensor and is one run of bytes (all of it, or rows) is read by `preadv` straight into
the weight: no copy in between, and threads that wait for a disk or copy from the page cache do so without the
interpreter's lock. A range of columns is taken from the mapped file, of which only their pages are read.
"""

import math
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import EllipsisType

import torch
from msgspec import Struct
from torch import Tensor

from runtime.errors import ModelError
from runtime.huge_pages import prefer_huge_pages
from runtime.layers.weight import Index
from runtime.models.config.weight_files import StoredTensor, damaged, header_of
from runtime.regular_file import open_regular

PIECE_BYTES = 1 << 20  # that a thread reads at a time: a tensor is many, so all threads read it
CONVERTED_BYTES = 32 << 20  # that are read before they are converted or moved
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Parts = tuple[slice | int, ...]


class SafetensorsFile:
    """An open file: reads runs of its bytes."""

    def __init__(self, path: Path, file: BufferedReader, pool: ThreadPoolExecutor, uses_mmap: bool) -> None:
        """Raises OSError, ValueError and RecursionError for a file that is damaged."""
        self.path, self.uses_mmap = path, uses_mmap
        self._file, self._pool = file, pool
        self._octets: Tensor | None = None
        self.header = header_of(file)

    def tensors(self) -> Iterator[tuple[str, "FileTensor"]]:
        """All tensors by name, in the order of their bytes. Raises ModelError for a dtype that
        torch lacks."""
        for name, stored in self.header.tensors.items():
            if stored.dtype not in DTYPES:
                raise ModelError(f"{name} in {self.path.name} is of dtype {stored.dtype}, which is not read")
            yield name, FileTensor(self, stored)

    def read(self, offset: int, target: Tensor) -> None:
        """Fills a contiguous tensor of the cpu from `offset`, in bytes behind the header. Raises ModelError
        where the file has become shorter."""
        if not target.numel():
            return
        memory = memoryview(target.detach().reshape(-1).view(torch.uint8).numpy())
        begin, descriptor = self.header.begin + offset, self._file.fileno()

        def fill(at: int) -> None:
            end = min(at + PIECE_BYTES, len(memory))
            while at < end:
                count = os.preadv(descriptor, [memory[at:end]], begin + at)
                if count <= 0:
                    raise damaged(self.path, "it ends before its tensors do")
                at += count

        try:
            pieces = range(0, len(memory), PIECE_BYTES)
            if len(pieces) == 1:
                fill(0)
            else:
                list(self._pool.map(fill, pieces))
        except OSError as error:
            raise damaged(self.path, error) from None

    def mapped(self, stored: StoredTensor) -> Tensor:
        """A tensor in pages of the page cache."""
        if self._octets is None:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            data = mmap.mmap(self._file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._octets = torch.frombuffer(data, dtype=torch.uint8)
        begin, end = (self.header.begin + offset for offset in stored.data_offsets)
        dtype = DTYPES[stored.dtype]
        octets = self._octets[begin:end]
        # a header need not end at a multiple of the numbers' size
        octets = octets if begin % dtype.itemsize == 0 else octets.clone()
        return octets.view(dtype).view(stored.shape)


class FileTensor:
    """A TensorReader (layers/weight.py) of a tensor in an open file."""

    def __init__(self, file: SafetensorsFile, stored: StoredTensor) -> None:
        self._file, self._stored = file, stored

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        return self._stored.dtype

    def __getitem__(self, index: Index) -> Tensor:
        """Reads this part; columns may be views of the mapped file."""
        parts = index_parts(index, self._stored.shape)
        run = _run(parts, self._stored.shape)
        if not run.is_whole and self._file.uses_mmap and self._stored.num_bytes:
            return self._file.mapped(self._stored)[parts]
        found = torch.empty(run.shape, dtype=DTYPES[self._stored.dtype])
        prefer_huge_pages(found.data_ptr(), found.nbytes)
        self._file.read(self._offset(run), found)
        return found if run.is_whole else found[run.rest]

    def copy_to(self, target: Tensor, index: Index) -> None:
        """Reads this part into a tensor of any dtype on any device; what must be converted or moved, a few
        rows at a time."""
        run = _run(index_parts(index, self._stored.shape), self._stored.shape)
        dtype = DTYPES[self._stored.dtype]
        if run.is_whole and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self._file.read(self._offset(run), target)
            return
        row_bytes = math.prod(run.shape[1:]) * dtype.itemsize
        step = max(1, CONVERTED_BYTES // max(1, row_bytes))
        if not run.is_whole or not run.shape or run.shape[0] <= step or target.dim() != len(run.shape):
            target.copy_(self[index])
            return
        for at in range(0, run.shape[0], step):
            rows = torch.empty(min(step, run.shape[0] - at), *run.shape[1:], dtype=dtype)
            self._file.read(self._offset(run) + at * row_bytes, rows)
            target[at : at + step].copy_(rows)

    def _offset(self, run: "_Run") -> int:
        return self._stored.data_offsets[0] + run.begin * DTYPES[self._stored.dtype].itemsize


class _Run(Struct, frozen=True):
    """Numbers that lie one behind the other in a tensor's file."""

    begin: int  # the first of them
    shape: tuple[int, ...]
    rest: Parts  # which part of them is wanted

    @property
    def is_whole(self) -> bool:
        """Whether all of them are wanted."""
        return all(part == slice(None) for part in self.rest)


def index_parts(index: Index, shape: tuple[int, ...]) -> Parts:
    """An index with a part for each dimension; slices that are all of a dimension are slice(None)."""
    given = index if isinstance(index, tuple) else (index,)
    parts: list[slice | int] = []
    for part in given:
        if isinstance(part, EllipsisType):
            parts += [slice(None)] * (len(shape) - len(given) + 1)
        else:
            parts.append(part)
    parts += [slice(None)] * (len(shape) - len(parts))
    return tuple(
        slice(None) if isinstance(part, slice) and part.indices(size) == (0, size, 1) else part
        for part, size in zip(parts, shape, strict=True)
    )


def _run(parts: Parts, shape: tuple[int, ...]) -> _Run:
    """The shortest run of numbers with all that is wanted: single entries of the first dimensions, then a
    range of the next one."""
    begin, stride = 0, math.prod(shape)
    for dim, (part, size) in enumerate(zip(parts, shape, strict=True)):
        stride //= max(1, size)
        if isinstance(part, int):
            begin += range(size)[part] * stride
            continue
        first, last, step = part.indices(size)
        assert step == 1, "a checkpoint's tensor is read by ranges"
        rest = (slice(None), *parts[dim + 1 :])
        return _Run(begin + first * stride, (max(0, last - first), *shape[dim + 1 :]), rest)
    return _Run(begin, (), ())


@contextmanager
def open_safetensors(path: Path, pool: ThreadPoolExecutor, uses_mmap: bool) -> Iterator[SafetensorsFile]:
    """A safetensors file. Raises ModelError for a damaged one."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise damaged(path, error) from None
    with file:
        try:
            opened = SafetensorsFile(path, file, pool, uses_mmap)
        except (OSError, ValueError, RecursionError) as error:
            raise damaged(path, error) from None
        yield opened
