"""Huge pages are asked for where they are worth it, and only in whole pages of the memory that was named."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from runtime.huge_pages import LEAST_BYTES, prefer_huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that an address lies in (proc(5), smaps)."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no huge pages")
def test_whole_pages_of_large_memory_are_advised() -> None:
    memory = mmap.mmap(-1, 4 * LEAST_BYTES)
    first = np.frombuffer(memory, np.uint8).ctypes.data
    begin = first + LEAST_BYTES + 5  # no multiple of a page
    assert prefer_huge_pages(begin, LEAST_BYTES + 100)
    assert "hg" in flags_at(begin + mmap.PAGESIZE)
    assert "hg" not in flags_at(begin)  # its page has other memory too
    assert "hg" not in flags_at(begin + LEAST_BYTES + 100)


def test_little_memory_is_left_alone() -> None:
    memory = np.empty(LEAST_BYTES - 1, np.uint8)
    assert not prefer_huge_pages(memory.ctypes.data, memory.nbytes)
