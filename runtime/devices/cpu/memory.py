"""Memory of the cpu device: the memory of the machine."""

import ctypes
import mmap
import os
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from runtime.devices.cgroup import available_bytes
from runtime.devices.cpu.page_copies import CpuPageCopier
from runtime.devices.host_memory import HostPages

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LOADING_BYTES, _STEPPING_BYTES = 1 << 20, 1 << 30


def set_malloc_threshold(num_bytes: int) -> None:
    """Sets the size from which on malloc maps memory for an allocation and unmaps it when it is freed. No
    effect without glibc.

    While weights are loaded all tensors should be mapped, so that those that packing replaces are returned.
    In steps no tensor should be: page faults of a step's larger tensors measured 5 to 10 times slower than
    the arithmetic on them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, num_bytes)
        mallopt(_M_TRIM_THRESHOLD, num_bytes)


class CpuMemory:
    """Memory of a machine that `num_ranks` ranks share. Made before weights are loaded."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.prepare_loading()

    def free_bytes(self) -> int:
        """This rank's part of the available memory."""
        return available_bytes() // self.num_ranks

    def used_bytes(self) -> int:
        """Resident memory of this process."""
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    def prepare_loading(self) -> None:
        """Has malloc map large allocations."""
        set_malloc_threshold(_LOADING_BYTES)

    def empty_cache(self) -> None:
        """Returns free memory of malloc, and has it keep large allocations from now on."""
        set_malloc_threshold(_STEPPING_BYTES)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def measure_peak(self, run: Callable[[], None]) -> int:
        """0: the peak of a CPU's memory cannot be measured."""
        return 0

    def allocate_cache(self, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """An anonymous mapping, with huge pages where the kernel has them. Physical memory is taken when
        tokens are written."""
        memory = mmap.mmap(
            -1,
            num_tokens * num_heads * head_dim * dtype.itemsize,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype).view(num_tokens, num_heads, head_dim)

    def allocate_states(self, num_states: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory.allocate_states."""
        return self.allocate_cache(num_states, 1, prod(shape), dtype).view(num_states, *shape)

    def free_host_bytes(self, cache_bytes: int) -> int:
        """Free memory without the cache, which is in the same memory."""
        return max(0, self.free_bytes() - cache_bytes)

    def open_page_copier(
        self, kv: list[tuple[Tensor, ...]], host: HostPages, page_size: int
    ) -> CpuPageCopier:
        """See Memory.open_page_copier."""
        return CpuPageCopier(kv, host, page_size)
