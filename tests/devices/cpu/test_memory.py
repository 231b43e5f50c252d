"""Where the figure for free memory comes from, and that a cache takes memory only as it is written."""

import resource
from pathlib import Path

import pytest
import torch

from runtime.devices.cgroup import available_bytes
from runtime.devices.cpu.memory import CpuMemory

MEMINFO = "MemTotal:       2000 kB\nMemFree:  10 kB\nMemAvailable:   1000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, 1000 * 1024),
        ({"memory.max": "500000", "memory.current": "100000"}, 400000),
        ({"memory.max": "9000000000", "memory.current": "0"}, 1000 * 1024),
        ({"memory.max": "5", "memory.current": "9"}, 0),
        ({"memory/memory.limit_in_bytes": "300000", "memory/memory.usage_in_bytes": "100000"}, 200000),
    ],
)
def test_available_bytes(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, content in (
        {"proc/meminfo": MEMINFO} | {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    ).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert available_bytes(tmp_path) == expected


def test_this_machine_has_some() -> None:
    assert 0 < CpuMemory(2).free_bytes() <= CpuMemory(1).free_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_is_lazy_zeros(dtype: torch.dtype) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = CpuMemory(1).allocate_cache(1 << 20, 8, 128, dtype)  # 2 or 4 GB
    assert cache.shape == (1 << 20, 8, 128) and cache.dtype == dtype
    assert cache[12345].abs().sum() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
