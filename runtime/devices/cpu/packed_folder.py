"""The folder of files of packed matrices: found by key, written once, bounded in bytes.

A file is written beside its place, `KEY.writing`, under a lock that ends with its writer, and then renamed:
a file by the name of its key is always whole. What a writer that was killed left is removed by the next one.
The file that was used longest ago goes first when there is no room; processes that have it mapped keep it.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FREE_SHARE = 0.05  # of the file system that a file leaves free
TRUSTED = frozenset({0})  # users whose files are read, besides our own


class PackedFolder:
    """Files of at most `max_bytes` together. The folder is made when the first one is written."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def path(self, key: str) -> Path:
        """Where the file of a key is, or would be."""
        return self.folder / f"{key}.packed"

    @contextmanager
    def open(self, key: str) -> Iterator[int | None]:
        """The descriptor of a key's file; None: there is none. Raises OSError for a file that is no regular
        one, or not this user's or root's: another user could have written any weights."""
        try:
            fd = os.open(self.path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in TRUSTED | {os.geteuid()}:
                raise PermissionError(f"{self.path(key)} is not a file of this user")
            yield fd
        finally:
            os.close(fd)

    def touch(self, key: str) -> None:
        """The file was used now; nothing where the folder cannot be written to."""
        try:
            os.utime(self.path(key))
        except OSError:
            return

    def remove(self, key: str) -> None:
        """Removes a damaged file. Raises OSError."""
        self.path(key).unlink(missing_ok=True)

    def write(self, key: str, num_bytes: int, fill: Callable[[int], None]) -> str:
        """Has `fill` write a file of `num_bytes` to a descriptor. -> why there is none now; empty: there is
        one, of this process or of another. Raises OSError."""
        if num_bytes > self.max_bytes:
            return f"it is larger than the cache, {self.max_bytes} bytes"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock(key) as fd:
            if fd is None or self.path(key).exists():
                return ""
            self._make_room(num_bytes)
            disk = shutil.disk_usage(self.folder)
            if disk.free - num_bytes < FREE_SHARE * disk.total:
                return f"the disk has only {disk.free} bytes left"
            fill(fd)
            os.replace(self._writing(key), self.path(key))
        return ""

    def _writing(self, key: str) -> Path:
        return self.folder / f"{key}.writing"

    @contextmanager
    def _lock(self, key: str) -> Iterator[int | None]:
        """An empty file that only this process writes; None: another one does. It is removed, unless it was
        renamed."""
        path = self._writing(key)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not _locks(fd, path):
                yield None
                return
            try:
                os.ftruncate(fd, 0)
                yield fd
            finally:
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _make_room(self, num_bytes: int) -> None:
        """Removes what killed writers left, and files until `num_bytes` fit."""
        for path in self.folder.glob("*.writing"):
            _remove_left(path)
        files = []
        for path in self.folder.glob("*.packed"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue  # another process has removed it
            files.append((found.st_mtime_ns, found.st_size, path))
        total = num_bytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _locks(fd: int, path: Path) -> bool:
    """Locks a file; False: another process has done so, or has removed or renamed it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_left(path: Path) -> None:
    """Removes a file that no process writes any more."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed, or not ours
        return
    try:
        if _locks(fd, path):
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)
