"""A disk that fails on command: below the folder of stored objects, and below SQLite.

full        no byte can be written (half of the bytes are, before that is noticed)
read-only   nothing can be opened for writing
broken      reads and writes end with an error of the device
hung        nothing comes to an end until the disk is repaired
vanished    the folder is gone, as with a mount that has left
"""

import errno
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from runtime.http.openai import batch_runner, batches, files
from runtime.http.openai.stored import folder, records, upload
from runtime.http.openai.stored.record_table import RecordTable
from runtime.http.openai.stored_objects import StoredObjects

KINDS = ("full", "read-only", "broken", "hung", "vanished")
STATUS = {"full": 507}  # of what needs the disk; 503 for the others
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FaultyOs:
    """The module `os`, whose calls fail as the disk says."""

    def __init__(self, disk: "FaultyDisk") -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        self._disk.meet(is_write=bool(flags & WRITING))
        if self._disk.kind == "read-only" and flags & WRITING:
            raise OSError(errno.EROFS, "Read-only file system")
        return os.open(path, flags, mode)

    def write(self, file: int, data: memoryview) -> int:
        self._disk.meet(is_write=True)
        if self._disk.kind == "full":
            if len(data) < 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            os.write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(file, data)

    def pread(self, file: int, size: int, position: int) -> bytes:
        self._disk.meet(is_write=False)
        return os.pread(file, size, position)

    def fsync(self, file: int) -> None:
        self._disk.meet(is_write=True)


class FaultyDisk:
    """Fails as `fail` says, until `repair`. Everything is tried again at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.kind: str | None = None
        self.path = path
        self._goes_on = threading.Event()
        for module in (folder, upload, batches, files):
            monkeypatch.setattr(module, "os", FaultyOs(self))
        for module in (batch_runner, records):
            monkeypatch.setattr(module, "RETRY_S", 0.02)
        opened = RecordTable._opened

        def open_table(table: RecordTable[Any]) -> sqlite3.Connection:
            self.meet(is_write=False, error=sqlite3.OperationalError("disk I/O error"))
            db = opened(table)
            db.execute(f"PRAGMA max_page_count = {1 if self.kind == 'full' else 2**30}")
            db.execute(f"PRAGMA query_only = {int(self.kind == 'read-only')}")
            return db

        monkeypatch.setattr(RecordTable, "_opened", open_table)

    def fail(self, kind: str, stored_objects: StoredObjects) -> None:
        assert stored_objects._disk is not None
        if kind == "hung":
            stored_objects._disk.limit_s = 0.1
            self._goes_on.clear()
        elif kind == "vanished":
            self.path.rename(self.path.with_name("elsewhere"))
        self.kind = kind

    def repair(self) -> None:
        if self.kind == "vanished":
            self.path.with_name("elsewhere").rename(self.path)
        self.kind = None
        self._goes_on.set()

    def meet(self, *, is_write: bool, error: Exception | None = None) -> None:
        """What a call meets before it does anything."""
        if self.kind == "hung":
            assert self._goes_on.wait(60)
        elif self.kind == "broken":
            raise error or OSError(errno.EIO, "Input/output error")
