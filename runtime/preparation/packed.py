"""Prepared files in memory without a name: their arrays, and behind these the rest of their fields."""

import mmap
import os

import msgspec
import numpy as np

from runtime.preparation.messages import ArrayPlace, PreparedHead
from runtime.text.media_prompts import Prepared

ALIGN = 64  # bytes
COPIED_BYTES = 1 << 20  # up to which memory is copied: each that is mapped keeps a descriptor open
_decoder = msgspec.msgpack.Decoder(PreparedHead)


def write_prepared(one: Prepared) -> tuple[int, int]:
    """-> a descriptor of the memory, and where the head begins in it"""
    fd = os.memfd_create("prepared", os.MFD_CLOEXEC)
    head = _written(fd, one)
    head_at = os.lseek(fd, 0, os.SEEK_CUR)
    _write(fd, memoryview(msgspec.msgpack.encode(head)))
    return fd, head_at


def read_prepared(fd: int, head_at: int) -> Prepared:
    """The file whose arrays and head lie in this memory, which the caller closes. Arrays are read-only."""
    size = os.fstat(fd).st_size
    memory: mmap.mmap | bytes = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    if size <= COPIED_BYTES:
        memory = bytes(memory)
    else:
        # each page is looked at here, where numpy lets the event loop run, so that none is missing there
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
    return _read(memory, _decoder.decode(memoryview(memory)[head_at:]))


def _written(fd: int, one: Prepared) -> PreparedHead:
    """Writes the arrays of a file and of its parts."""
    return PreparedHead(
        kind=one.kind,
        digest=one.digest,
        values=_placed(fd, one.values, np.float32),
        positions=_placed(fd, one.positions, np.int32),
        token_ids=one.token_ids,
        grid=one.grid,
        token_grids=one.token_grids,
        frame_step=one.frame_step,
        replaced=one.replaced,
        around=one.around,
        joined=[(*pair, token) for pair, token in one.joined.items()],
        parts=tuple([_written(fd, part) for part in one.parts]),
        inner=tuple([_written(fd, part) for part in one.inner]),
    )


def _placed(fd: int, array: np.ndarray, dtype: type[np.generic]) -> ArrayPlace:
    """Writes an array behind what was written."""
    begin = os.lseek(fd, -(-os.lseek(fd, 0, os.SEEK_CUR) // ALIGN) * ALIGN, os.SEEK_SET)
    _write(fd, np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data)
    return ArrayPlace(begin, array.shape)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _read(memory: mmap.mmap | bytes, head: PreparedHead) -> Prepared:
    def array(place: ArrayPlace, dtype: type[np.generic]) -> np.ndarray:
        count = int(np.prod(place.shape, dtype=np.int64))
        return np.frombuffer(memory, dtype, count, place.begin).reshape(place.shape)

    replaced, around = head.replaced, head.around
    return Prepared(
        kind=head.kind,
        digest=head.digest,
        values=array(head.values, np.float32),
        token_ids=head.token_ids,
        positions=array(head.positions, np.int32),
        grid=head.grid,
        token_grids=head.token_grids,
        frame_step=head.frame_step,
        replaced=(replaced[0], replaced[1]) if replaced else (),
        around=(around[0], around[1]) if around else (),
        joined={(first, second): token for first, second, token in head.joined},
        parts=tuple([_read(memory, part) for part in head.parts]),
        inner=tuple([_read(memory, part) for part in head.inner]),
    )
