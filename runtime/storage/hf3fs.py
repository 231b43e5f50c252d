"""Records in 3FS, DeepSeek's file system, read and written through its user-space rings (USRBIO).

    --hicache-storage-backend hf3fs
    --hicache-storage-backend-extra-config '{"dir": "/3fs/stage/pages", "max_bytes": 4000000000000}'

A record is a file, as in files.py, which opens, renames and evicts them through the mounted file system. Its
bytes go from and to the storage servers by the network, through memory that 3FS has registered:
`hf3fs_fuse.io` of deepseek-ai/3FS, with the package hf3fs-py-usrbio.
"""

import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Protocol

import msgspec
from msgspec import structs

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig
from runtime.storage.buffers import import_store
from runtime.storage.files import FileBackend
from runtime.storage.settings import Hf3fsSettings

SHARED_MEMORY = Path("/dev/shm")  # where make_iovec looks for memory by its name


class Done(Protocol):
    """A finished operation."""

    result: int  # bytes; or an error number, negative


class Submitted(Protocol):
    """Operations that were submitted."""

    def wait(self, *, min_results: int, timeout: timedelta) -> Sequence[Done]:
        """-> those that have finished"""
        ...


class Ring(Protocol):
    """The methods of 3FS's `ioring` that are used here."""

    def prepare(self, memory: object, for_read: bool, file: int, offset: int) -> None:
        """Adds an operation."""
        ...

    def submit(self) -> Submitted:
        """Begins all that were added."""
        ...


class SharedBlock:
    """Memory with a name in /dev/shm while it is made known to 3FS, with the fields of
    multiprocessing.shared_memory.SharedMemory that `make_iovec` reads. That class itself would start a
    process that tracks it."""

    def __init__(self, num_bytes: int) -> None:
        self.name = f"runtime-{secrets.token_hex(8)}"
        file = os.open(SHARED_MEMORY / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, num_bytes)
            self._memory = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        self.buf = memoryview(self._memory)

    def unlink(self) -> None:
        """Takes its name away; the memory stays."""
        (SHARED_MEMORY / self.name).unlink()


class Rings:
    """Memory and rings of one thread."""

    def __init__(self, module: ModuleType, mount: str, num_bytes: int) -> None:
        self.block = SharedBlock(num_bytes)
        try:
            self.memory = module.make_iovec(self.block, mount)
            self.reading: Ring = module.make_ioring(mount, 1, for_read=True, timeout=1)
            self.writing: Ring = module.make_ioring(mount, 1, for_read=False, timeout=1)
        finally:
            self.block.unlink()


class UsrbioFiles:
    """FileIO through the rings, one record at a time in each thread."""

    def __init__(self, module: ModuleType, mount: str, num_bytes: int, timeout_s: float) -> None:
        """`num_bytes`: of the largest file; `timeout_s`: for one operation."""
        self._module, self._mount, self._size = module, mount, num_bytes
        self._timeout = timedelta(seconds=timeout_s)
        self._own = threading.local()

    def read(self, file: int, buffers: Sequence[memoryview]) -> int:
        """See FileIO.read."""
        rings, total = self._rings(), sum(part.nbytes for part in buffers)
        count = self._run(rings.reading, rings, file, total, for_read=True)
        at = 0
        for part in buffers if count == total else ():
            part[:] = rings.block.buf[at : at + part.nbytes]
            at += part.nbytes
        return count

    def write(self, file: int, buffers: Sequence[memoryview]) -> int:
        """See FileIO.write."""
        rings, at = self._rings(), 0
        for part in buffers:
            rings.block.buf[at : at + part.nbytes] = part
            at += part.nbytes
        count = self._run(rings.writing, rings, file, at, for_read=False)
        if count != at:
            raise OSError(f"3FS wrote {count} of {at} bytes")
        return count

    def _run(self, ring: Ring, rings: Rings, file: int, size: int, *, for_read: bool) -> int:
        """-> bytes. Raises OSError."""
        self._module.register_fd(file)
        try:
            ring.prepare(rings.memory[0:size], for_read, file, 0)
            done = ring.submit().wait(min_results=1, timeout=self._timeout)
        finally:
            self._module.deregister_fd(file)
        if not done:
            del self._own.rings  # it may still write to the memory
            raise OSError(f"3FS did nothing for {self._timeout.total_seconds():g} s")
        if done[0].result < 0:
            raise OSError(-done[0].result, os.strerror(-done[0].result))
        return done[0].result

    def _rings(self) -> Rings:
        rings: Rings | None = getattr(self._own, "rings", None)
        if rings is None:
            rings = self._own.rings = Rings(self._module, self._mount, self._size)
        return rings


def open_hf3fs(config: BackendConfig) -> FileBackend:
    """Raises StartError without the package, and for a folder that is not on a mounted 3FS."""
    settings = msgspec.convert(config.settings, Hf3fsSettings)  # checked with the options
    module = import_store("hf3fs_fuse.io", "hf3fs")
    mount = module.extract_mount_point(settings.dir)
    if not mount:
        raise StartError(
            f'--hicache-storage-backend hf3fs: {settings.dir} is on no mounted 3FS; correct "dir" in '
            "--hicache-storage-backend-extra-config, or take --hicache-storage-backend file"
        )
    files = UsrbioFiles(module, str(mount), config.record_bytes, settings.client_timeout)
    own = {"dir": settings.dir, "max_bytes": settings.max_bytes}
    return FileBackend(structs.replace(config, settings=own), files)
