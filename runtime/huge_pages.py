"""Memory in huge pages, for what is written once and large: a kernel that gives memory in pages of 4 KB takes
longer to make them than to fill them (transparent huge pages, Linux' admin-guide/mm/transhuge)."""

import ctypes
import mmap

LEAST_BYTES = 4 << 20  # of memory that is worth it: at least one huge page of 2 MB lies whole in it
_libc = ctypes.CDLL(None)


def prefer_huge_pages(address: int, num_bytes: int) -> bool:
    """Asks for huge pages in memory that nothing has been written to yet. -> whether they were granted; never
    for less than LEAST_BYTES, nor where the kernel has none."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or num_bytes < LEAST_BYTES:
        return False
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    return _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice) == 0
