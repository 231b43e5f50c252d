"""Memory for one record in each thread, which libraries of stores read and write."""

import ctypes
import importlib
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from runtime.errors import StartError

Register = Callable[[int, int], None]  # address, bytes: makes memory known to a library


class RecordBuffer:
    """Memory for one record."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = ctypes.create_string_buffer(num_bytes)
        self.address = ctypes.addressof(self._memory)
        self.view = memoryview(self._memory).cast("B")

    def gather(self, parts: Sequence[memoryview]) -> None:
        """Copies the parts of a record into it, one behind the other."""
        at = 0
        for part in parts:
            self.view[at : at + part.nbytes] = part
            at += part.nbytes

    def scatter(self, parts: Sequence[memoryview]) -> None:
        """Copies a record from it into its parts."""
        at = 0
        for part in parts:
            part[:] = self.view[at : at + part.nbytes]
            at += part.nbytes


class ThreadBuffers:
    """A RecordBuffer for each thread, made and registered when the thread first asks for it."""

    def __init__(self, num_bytes: int, register: Register = lambda address, size: None) -> None:
        self._size = num_bytes
        self._register = register
        self._own = threading.local()
        self._made: list[RecordBuffer] = []  # they outlive their threads, as libraries know them

    def own(self) -> RecordBuffer:
        """The buffer of the thread that calls. Raises what `register` raises."""
        buffer: RecordBuffer | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = RecordBuffer(self._size)
            self._register(buffer.address, self._size)
            self._made.append(buffer)
            self._own.buffer = buffer
        return buffer


class Package(NamedTuple):
    """What a backend imports."""

    modules: tuple[str, ...]  # one of them
    remedy: str


PACKAGES = {
    "mooncake": Package(("mooncake.store",), "pip install mooncake-transfer-engine"),
    # nixl's modules by the accelerator's library; `nixl` itself would import torch to choose among them
    "nixl": Package(("nixl_cu13", "nixl_cu12", "nixl_rocm"), "pip install nixl"),
    "hf3fs": Package(("hf3fs_fuse.io",), "3FS's own package, and pip install hf3fs-py-usrbio"),
    "eic": Package(("eic",), "it comes with the service"),
    "simm": Package(("simm.kv",), "build it as github.com/scitix/SiMM says"),
    "aibrix": Package(("aibrix_kvcache",), "pip install aibrix-kvcache"),
    "lmcache": Package(("lmcache.v1.cache_engine",), "pip install lmcache"),
}


def import_store(module: str, backend: str) -> ModuleType:
    """The module of a store's library. Raises StartError where it can't be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise StartError(missing(backend, str(error))) from None


def missing(backend: str, reason: str) -> str:
    """What to say of a backend whose package can't be imported."""
    package = PACKAGES[backend]
    flag = "--enable-lmcache" if backend == "lmcache" else f"--hicache-storage-backend {backend}"
    return (
        f"{flag} needs the module {package.modules[0]}, which can't be imported ({reason}); install it "
        f"({package.remedy}), or take --hicache-storage-backend file"
    )
