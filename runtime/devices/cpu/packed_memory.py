"""The data of a file of packed matrices in memory, where kernels read it as fast as memory of their own.

A step reads every weight once. In pages of 4 KB that costs a sixth more than in huge pages, because the
processor walks tables for each page. File systems that keep files in large pages (ext4, xfs and btrfs of
Linux 6.x, when they were asked to) have them mapped as huge pages, and then all processes share the memory.
Where they do not, the data is read into huge pages of this process, by all threads.
"""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from runtime.devices.cpu.matrices import Threads
from runtime.devices.cpu.packed_file import PIECE_BYTES, DamagedFile, Header

READ_BYTES = 32 << 20  # that a thread reads at once
HUGE_SHARE = 0.9  # of the data that must be in huge pages for the mapping to stay
SMALL_BYTES = 64 << 20  # data of fewer bytes stays mapped: the processor's own tables cover most of it
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = Path("/proc/self/smaps")


def load_data(fd: int, header: Header, threads: Threads) -> tuple[np.ndarray, bool]:
    """The data of a file, uint8, read-only where it is mapped, and whether it is. Raises DamagedFile,
    OSError."""
    num_bytes = header.contents.data_bytes
    os.posix_fadvise(fd, header.begin, num_bytes, os.POSIX_FADV_WILLNEED)
    mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=header.begin)
    prefer_huge_pages(mapping)
    data = array_over(mapping)
    digest = threads.functions.kernels_digest(threads.handle, data.ctypes.data, num_bytes // PIECE_BYTES, 0)
    if digest % 2**64 != header.digest:
        raise DamagedFile("its data is not what was written")
    if num_bytes < SMALL_BYTES or huge_bytes(data.ctypes.data) >= HUGE_SHARE * num_bytes:
        return data, True
    if not has_huge_pages():
        return data, True
    return read_data(fd, header, threads.num_threads), False


def read_data(fd: int, header: Header, num_threads: int) -> np.ndarray:
    """The data in memory of this process. Raises DamagedFile for a file that has become shorter, OSError."""
    num_bytes = header.contents.data_bytes
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(memory)
    view = memoryview(memory)

    def read(begin: int) -> None:
        part = view[begin : begin + READ_BYTES]
        while part:
            count = os.preadv(fd, [part], header.begin + begin)
            if not count:
                raise DamagedFile("it was cut short")
            part, begin = part[count:], begin + count

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(0, num_bytes, READ_BYTES)))
    return array_over(memory)


def prefer_huge_pages(mapping: mmap.mmap) -> None:
    """Asks for huge pages where the system knows of them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            return


def array_over(mapping: mmap.mmap) -> np.ndarray:
    """A mapping as uint8, which keeps it open. To write to one that is read-only ends the process."""
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    memory = (ctypes.c_uint8 * len(mapping)).from_address(address)
    memory.mapping = mapping  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8)


def has_huge_pages() -> bool:
    """Whether a process may have huge pages."""
    try:
        return "[never]" not in SETTING.read_text(encoding="ascii")
    except OSError:
        return False


def huge_bytes(address: int) -> int:
    """Bytes of the mapping that begins at `address` that are mapped as huge pages of a file; 0 where the
    system does not say."""
    try:
        lines = SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    start = f"{address:08x}-"
    is_ours = False
    for line in lines:
        if line.startswith(start):
            is_ours = True
        elif is_ours and line.startswith("FilePmdMapped:"):
            return int(line.split()[1]) << 10
    return 0
