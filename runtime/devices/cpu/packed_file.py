"""A file of packed matrices, as kernels read them: written once, mapped by later starts.

    magic, 16 bytes | length of the header, place of the data, digest of the data: 8 bytes each, little-endian
    BLAKE2b of these numbers and of the header, 32 bytes | header, JSON | zeros | data

Data begins at a multiple of 2 MB, so that huge pages of the file can be mapped, and is a multiple of 1 MB:
the numbers of all matrices in order, each part at a multiple of 64 bytes, with zeros between and behind them.
"""

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from runtime.devices.cpu.kernels.library import Library
from runtime.devices.cpu.matrices import Form, Kind, Matrix, matrix_of, num_scales, packed_bytes

MAGIC = b"packed weights 1"
PREAMBLE_BYTES = 72
HUGE_BYTES = 2 << 20  # a multiple of what huge pages are; data begins at one
PIECE_BYTES = 1 << 20  # digest::PIECE
STAGED_BYTES = 16 << 20  # written at once, so that the file system may take large pages
PART_MULTIPLE = 64
MAX_HEADER_BYTES = 64 << 20


class DamagedFile(ValueError):
    """A file is not what was written."""


class StoredMatrix(Struct, frozen=True, array_like=True):
    """A matrix's form, and where its parts begin in the data; without scales it has neither of the last."""

    kind: int
    outputs: int
    inputs: int
    group: int
    data: int
    scales: int = 0
    sums: int = 0

    @property
    def form(self) -> Form:
        """See Form. Raises ValueError for a kind that these kernels lack."""
        return Form(Kind(self.kind), self.outputs, self.inputs, self.group)


class Contents(Struct, frozen=True):
    """The header of a file."""

    key: str
    names: tuple[str, ...]  # weights of the model that are in these matrices, and nowhere else
    matrices: tuple[StoredMatrix, ...]
    data_bytes: int


def aligned(count: int, multiple: int) -> int:
    """The next multiple that is not smaller."""
    return -(-count // multiple) * multiple


def contents_of(key: str, names: Sequence[str], matrices: Sequence[tuple[Form, Matrix]]) -> Contents:
    """Places for all parts of matrices."""
    stored, end = [], 0
    for form, matrix in matrices:
        places = []
        for part in parts(matrix):
            places.append(end)
            end = aligned(end + part.nbytes, PART_MULTIPLE)
        stored.append(StoredMatrix(form.kind, form.outputs, form.inputs, form.group, *places))
    return Contents(key, tuple(sorted(names)), tuple(stored), aligned(end, PIECE_BYTES))


def parts(matrix: Matrix) -> list[Tensor]:
    """The tensors of a matrix, in the order in which they are stored."""
    return [part for part in (matrix.data, matrix.scales, matrix.sums) if part is not None]


def file_bytes(contents: Contents) -> int:
    """Length of the file."""
    return data_begin(contents) + contents.data_bytes


def data_begin(contents: Contents) -> int:
    """Where data begins in the file."""
    return aligned(PREAMBLE_BYTES + len(msgspec.json.encode(contents)), HUGE_BYTES)


def write(fd: int, contents: Contents, matrices: Sequence[Matrix], library: Library) -> None:
    """Fills an empty file, its header last. Raises OSError. The digest is computed by the caller's thread."""
    header, begin = msgspec.json.encode(contents), data_begin(contents)
    digest = written = 0
    for staged in _staged(contents, matrices):
        pieces = len(staged) // PIECE_BYTES
        digest += library.functions.kernels_digest(None, staged.ctypes.data, pieces, written // PIECE_BYTES)
        _write_at(fd, staged.data, begin + written)
        written += len(staged)
    numbers = np.array([len(header), begin, digest % 2**64], np.uint64).tobytes()
    _write_at(fd, memoryview(MAGIC + numbers + _checksum(numbers, header) + header), 0)


def _staged(contents: Contents, matrices: Sequence[Matrix]) -> Iterator[np.ndarray]:
    """The data in blocks of STAGED_BYTES, the last one shorter; each is valid until the next."""
    block, filled = np.empty(STAGED_BYTES, np.uint8), 0
    for source in _in_order(contents, matrices):
        while len(source):
            count = min(len(source), STAGED_BYTES - filled)
            block[filled : filled + count] = source[:count]
            source, filled = source[count:], filled + count
            if filled == STAGED_BYTES:
                yield block
                filled = 0
    if filled:
        yield block[:filled]


def _in_order(contents: Contents, matrices: Sequence[Matrix]) -> Iterator[np.ndarray]:
    """All bytes of the data: parts of matrices, and zeros."""
    at = 0
    for stored, matrix in zip(contents.matrices, matrices, strict=True):
        places = (stored.data, stored.scales, stored.sums)
        for part, place in zip(parts(matrix), places, strict=False):
            yield np.zeros(place - at, np.uint8)
            yield part.numpy().view(np.uint8).ravel()
            at = place + part.nbytes
    yield np.zeros(contents.data_bytes - at, np.uint8)


def _write_at(fd: int, data: memoryview, at: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


def _checksum(numbers: bytes, header: bytes) -> bytes:
    return blake2b(numbers + header, digest_size=32).digest()


class Header(Struct, frozen=True):
    """What the beginning of a file says."""

    contents: Contents
    begin: int  # of the data in the file
    digest: int  # of the data


def read_header(fd: int, key: str) -> Header:
    """The header of a file for `key`. Raises DamagedFile, OSError."""
    preamble = os.pread(fd, PREAMBLE_BYTES, 0)
    if len(preamble) < PREAMBLE_BYTES or preamble[:16] != MAGIC:
        raise DamagedFile("it does not begin as such files do")
    length, begin, digest = np.frombuffer(preamble[16:40], np.uint64).tolist()
    if length > MAX_HEADER_BYTES:
        raise DamagedFile("its header is too long")
    header = os.pread(fd, length, PREAMBLE_BYTES)
    if _checksum(preamble[16:40], header) != preamble[40:]:
        raise DamagedFile("its header is not what was written")
    try:
        contents = msgspec.json.decode(header, type=Contents)
    except msgspec.MsgspecError as error:
        raise DamagedFile(str(error)) from None
    if contents.key != key:
        raise DamagedFile("it has other weights than its name says")
    size = os.fstat(fd).st_size
    if size != begin + contents.data_bytes:
        raise DamagedFile(f"it has {size} bytes instead of {begin + contents.data_bytes}")
    return Header(contents, begin, digest)


def matrices_of(contents: Contents, data: np.ndarray, library: Library) -> list[Matrix]:
    """The matrices of a file whose data is in memory. Raises DamagedFile where they do not fit."""
    made = []
    for stored in contents.matrices:
        form = stored.form
        count = num_scales(library, form) * 4
        sizes = (packed_bytes(library, form), count, count)
        places = (stored.data, stored.scales, stored.sums)
        if any(place + size > len(data) for place, size in zip(places, sizes, strict=True)):
            raise DamagedFile("a matrix is larger than the file")
        pieces = [data[place : place + size] for place, size in zip(places, sizes, strict=True)]
        scales = torch.from_numpy(pieces[1].view(np.float32)) if count else None
        sums = torch.from_numpy(pieces[2].view(np.int32)) if count else None
        made.append(matrix_of(library, form, torch.from_numpy(pieces[0]), scales, sums))
    return made
