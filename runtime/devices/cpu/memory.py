"""Memory of the cpu device: what the machine, or the cgroup that this process lives in, still has."""

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory() -> None:
    """Lets malloc reuse freed megabytes instead of returning them to the kernel: a step's larger tensors would otherwise
    be paged in anew each time, which measured 5 to 10 times slower than the arithmetic on them. No effect without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable, or what the cgroup (v2, then v1) leaves of its limit when that is less."""
    meminfo = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    for limit_name, usage_name in (("memory.max", "memory.current"),
                                   ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, usage = _read(group / limit_name), _read(group / usage_name)
        if limit.isdigit() and usage.isdigit():
            return min(available, max(0, int(limit) - int(usage)))
    return available


class CpuMemory:
    """Memory of a machine that `num_ranks` ranks share."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def free_bytes(self) -> int:
        return available_bytes() // self.num_ranks

    def allocate_cache(self, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Zero pages of the kernel (numpy's zeros are calloc's): physical memory is taken as tokens are written."""
        raw = np.zeros(num_tokens * num_heads * head_dim * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(num_tokens, num_heads, head_dim)
