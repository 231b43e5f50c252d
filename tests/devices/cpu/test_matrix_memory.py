"""Packed matrices lie one behind the other in huge pages, and give their memory back."""

import gc
from pathlib import Path

import pytest
import torch

from runtime.devices.cpu.matrix_memory import ALIGNMENT, HUGE_PAGE, MAPPING_BYTES, MatrixMemory
from tests.test_huge_pages import THP, flags_at


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no huge pages")
def test_small_matrices_share_huge_pages() -> None:
    memory = MatrixMemory()
    matrices = [memory.take(num_bytes) for num_bytes in (1, 65, 300_000, 900_001)]
    begins = [matrix.data_ptr() for matrix in matrices]
    assert begins[0] % HUGE_PAGE == 0 and begins[-1] + 900_001 - begins[0] < HUGE_PAGE
    assert all(begin % ALIGNMENT == 0 for begin in begins)
    ends = [matrix.data_ptr() + matrix.nbytes for matrix in matrices]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)), "none overlap"
    assert all("hg" in flags_at(begin) for begin in begins)


def test_a_mapping_lives_as_long_as_its_matrices() -> None:
    memory = MatrixMemory()
    first, second = memory.take(100), memory.take(200)
    large = memory.take(2 * MAPPING_BYTES)
    large[-1] = 7
    address = first.data_ptr()
    del first
    gc.collect()
    second.fill_(3)
    total = int(second.sum(dtype=torch.int64))
    assert is_mapped(address) and total == 600 and large[-1] == 7
    del second
    gc.collect()
    assert not is_mapped(address)
