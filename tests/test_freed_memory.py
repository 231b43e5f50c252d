"""Memory between blocks that are in use is returned."""

import subprocess
import sys

import pytest

# frees every second one of many small blocks at the end of the heap, and all but the last of large ones
SCRIPT = """
import ctypes
from runtime.freed_memory import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [libc.malloc(100_000) for _ in range(400)]
for block in blocks:
    libc.memset(block, 1, 100_000)
for block in blocks[:-1]:
    libc.free(block)
before = resident()
print(return_freed_memory(), before - resident() > 30_000_000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
