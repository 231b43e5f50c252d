"""The file backend: a file a record, in one directory that any number of servers may share.

    DIR/<identity>/<first byte of the key>/<key>.page      records
    DIR/writing/<server>/...                               records that are being written

The server locks `lock` in its folder of `writing` while it runs. A record is written under a temporary name
and renamed when it is complete, so that no reader sees half of one, whichever process is killed. There is no
fsync: what a power cut leaves behind has a wrong length or checksum, and is a miss. Folders of servers that
have ended are removed by the next server that opens the directory.

The directory holds at most `max_bytes` (as file lengths) of records, of all identities together; the least
recently used are evicted first. Records of other servers are found by scanning the directory after every
SCAN_SHARE of max_bytes of own writes, so with n servers it may hold up to n * SCAN_SHARE more for a while.
Use is recorded as the file's modification time, at most once in TOUCH_S.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig, Damaged
from runtime.storage.index import Entry, Index, scan
from runtime.storage.settings import FileSettings

SUFFIX = ".page"
WRITING = "writing"
SCAN_SHARE = 1 / 16
TOUCH_S = 60.0
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # errors of a disk that may take records again
MAX_PARTS = 1024  # of one readv or writev (IOV_MAX)


class FileIO(Protocol):
    """What reads and writes the bytes of open files. Called in worker threads, several at a time."""

    def read(self, file: int, buffers: Sequence[memoryview]) -> int:
        """Fills the buffers from the beginning of a file. -> bytes, fewer than all at its end. Raises
        OSError."""
        ...

    def write(self, file: int, buffers: Sequence[memoryview]) -> int:
        """Writes all buffers to an empty file. -> bytes. Raises OSError."""
        ...


class SystemCalls:
    """FileIO of the kernel."""

    def read(self, file: int, buffers: Sequence[memoryview]) -> int:
        """See FileIO.read."""
        return _transfer(os.readv, file, buffers)

    def write(self, file: int, buffers: Sequence[memoryview]) -> int:
        """See FileIO.write."""
        return _transfer(os.writev, file, buffers)


class FileBackend:
    """A directory of records; see backend.py. Raises StartError when it cannot be used at all."""

    def __init__(self, config: BackendConfig, files: FileIO | None = None) -> None:
        """`files`: moves the bytes of records; None: the kernel does."""
        self._files = files or SystemCalls()
        settings = msgspec.convert(config.settings, FileSettings)
        self.root = settings.folder()
        self.max_bytes = settings.max_bytes
        self.record_bytes = config.record_bytes
        if self.record_bytes > self.max_bytes:
            raise StartError(
                f'a page or state takes {self.record_bytes} bytes in storage, but "max_bytes" of '
                f"--hicache-storage-backend-extra-config is {self.max_bytes}; raise it"
            )
        self._identity = config.identity.hex()
        self._numbers = count()
        self._index = Index()
        # guards the index and the statistics; never held while a file is read or written
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._unscanned = 0  # bytes written since the last scan of the directory
        self._evicted = 0
        # folder for incomplete records, and its lock; None: there was no room for it yet
        self._own: tuple[Path, int] | None = None
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._own_folder()
                _sweep(self.root / WRITING)
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                # what is there can be read, and writing is tried again with each page
            self._index.replace(scan(self.root, SUFFIX))
            self._evict()
        except OSError as error:
            raise StartError(
                f"the directory of the storage tier cannot be used ({error.strerror or error}); give another "
                'one as "dir" in --hicache-storage-backend-extra-config'
            ) from error

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many records exist, from the first key on."""
        for number, key in enumerate(keys):
            name = self._name(key)
            # another server may have written it
            if name not in self._index and not (self.root / name).exists():
                return number
        return len(keys)

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """Fills the buffers. False: there is no such record. Raises Damaged for a file of another length."""
        name = self._name(key)
        try:
            file = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            with self._lock:
                self._index.drop(name)
            return False
        try:
            if (
                os.fstat(file).st_size != self.record_bytes
                or self._files.read(file, buffers) != self.record_bytes
            ):
                raise Damaged(name)
        finally:
            os.close(file)
        self._touch(name)
        return True

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """Stores the record, unless it exists, and evicts others for it. Raises OSError."""
        name = self._name(key)
        if (self.root / name).exists():
            self._touch(name)
            return
        temporary = self._own_folder() / f"{next(self._numbers)}"
        try:
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._files.write(file, buffers)
            finally:
                os.close(file)
            self._rename(temporary, self.root / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            now = time.time()
            self._index.put(name, Entry(self.record_bytes, now, now))
            self._unscanned += self.record_bytes
            is_due = self._unscanned > self.max_bytes * SCAN_SHARE
        if is_due:
            self._scan_again()
        self._evict()

    def remove(self, key: bytes) -> None:
        """Deletes a record."""
        (self.root / self._name(key)).unlink(missing_ok=True)
        with self._lock:
            self._index.drop(self._name(key))

    def clear(self) -> int:
        """Deletes all records of this identity. -> how many"""
        names = [name for name, _ in scan(self.root, SUFFIX) if name.startswith(self._identity)]
        for name in names:
            self._unlink(name)
        return len(names)

    def stats(self) -> Mapping[str, float]:
        """Records and bytes in the directory, as far as known, and evictions by this server."""
        with self._lock:
            return {"records": len(self._index), "bytes": self._index.num_bytes, "evicted": self._evicted}

    def close(self) -> None:
        """Removes this server's folder of incomplete records."""
        if self._own is not None:
            shutil.rmtree(self._own[0], ignore_errors=True)
            os.close(self._own[1])

    def _own_folder(self) -> Path:
        """This server's folder for incomplete records: made anew where it is gone, as with a directory that
        was away for a while. Raises OSError."""
        with self._lock:
            if self._own is not None and (self._own[0] / "lock").exists():
                return self._own[0]
            claimed = _claim(self.root / WRITING)
            if self._own is not None:
                os.close(self._own[1])
            self._own = claimed
            return claimed[0]

    def _name(self, key: bytes) -> str:
        text = key.hex()
        return f"{self._identity}/{text[:2]}/{text}{SUFFIX}"

    def _rename(self, temporary: Path, path: Path) -> None:
        try:
            temporary.rename(path)
        except FileNotFoundError:  # the first of its folder
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.rename(path)

    def _touch(self, name: str) -> None:
        """Records the use of a record, in the index and, for other servers and later ones, on disk."""
        now = time.time()
        with self._lock:
            known = self._index.get(name)
            noted_s = now if known is None or now - known.noted_s > TOUCH_S else known.noted_s
            self._index.put(name, Entry(self.record_bytes, now, noted_s))
        if noted_s == now:
            try:
                os.utime(self.root / name)
            except FileNotFoundError:
                with self._lock:
                    self._index.drop(name)

    def _scan_again(self) -> None:
        if not self._scanning.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._unscanned = 0
            records = scan(self.root, SUFFIX)
            with self._lock:
                self._index.replace(records)
        finally:
            self._scanning.release()

    def _evict(self) -> None:
        """Deletes the least recently used records until the limit holds, but none that another server has
        used since."""
        while True:
            with self._lock:
                if self._index.num_bytes <= self.max_bytes:
                    return
                name, entry = self._index.oldest()
                self._index.drop(name)
            try:
                stat = (self.root / name).stat()
            except FileNotFoundError:
                continue
            if stat.st_mtime > entry.used_s:
                with self._lock:
                    self._index.put(name, Entry(stat.st_size, stat.st_mtime, stat.st_mtime))
                continue
            self._unlink(name)
            with self._lock:
                self._evicted += 1

    def _unlink(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)
        with self._lock:
            self._index.drop(name)


def _transfer(call: Callable[[int, list[memoryview]], int], file: int, buffers: Sequence[memoryview]) -> int:
    """Reads into, or writes, all buffers. -> bytes, fewer than all at the end of a file"""
    total = 0
    left = [buffer for buffer in buffers if buffer.nbytes]
    left.reverse()
    while left:
        done = call(file, left[: -MAX_PARTS - 1 : -1])
        if not done:
            break
        total += done
        while left and done >= left[-1].nbytes:
            done -= left.pop().nbytes
        if done:
            left[-1] = left[-1][done:]
    return total


def _claim(folder: Path) -> tuple[Path, int]:
    """-> a folder for incomplete records of this server, and the lock file that is held while it runs"""
    folder.mkdir(mode=0o700, exist_ok=True)
    while True:
        own = Path(tempfile.mkdtemp(dir=folder))
        try:
            return own, _lock(own)
        except (BlockingIOError, FileNotFoundError):  # another server has removed it
            continue


def _lock(own: Path) -> int:
    """Locks the folder. Raises BlockingIOError when its server runs."""
    file = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _sweep(folder: Path) -> None:
    """Removes incomplete records of servers that have ended. A folder that was made in the last minute may
    not be locked yet, and stays."""
    for own in folder.iterdir():
        try:
            if time.time() - own.stat().st_mtime < TOUCH_S and not (own / "lock").exists():
                continue
            file = _lock(own)
        except OSError:  # its server runs, or it is gone, or the file system has no locks
            continue
        shutil.rmtree(own, ignore_errors=True)
        os.close(file)
