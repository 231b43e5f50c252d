"""Records of one kind in a SQLite file. Everything here blocks; RecordStore calls it in threads."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from runtime.http.openai.stored.folder import Folder, is_regular, open_private
from runtime.http.openai.stored.quota import Kept

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
T = TypeVar("T")


class Stored(Protocol):
    """What a record can do, whatever its kind."""

    @property
    def id(self) -> str:
        """The id by which clients know it."""

    @property
    def owner(self) -> str:
        """The name of its tenant."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change it but clients."""

    def end(self) -> None:
        """Ends a record that a server left open which was stopped."""


R = TypeVar("R", bound=Stored)


class Row(Struct, frozen=True):
    """A record as it is written."""

    id: str
    owner: str
    is_over: bool
    data: bytes  # the record's JSON


class RecordTable(Generic[R]):
    """Records of one kind in a file of the folder. It is opened by the first call, and again when it was
    damaged (it goes to quarantine then) or replaced. Calls do not wait for the disk: a crash of the machine
    may lose the last rows."""

    def __init__(self, folder: Folder, name: str, kind: type[R], kept: Kept) -> None:
        """`name` of the table and, with .sqlite, of its file. `kept` counts the rows and bounds them."""
        self.folder = folder
        self.path = folder.path / f"{name}.sqlite"
        self._name = name
        self._kind = kind
        self.kept = kept
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the open database
        self._has_ended_interrupted = False
        self._lock = threading.Lock()

    def put(self, rows: Iterable[Row]) -> None:
        """Stores records, or their new states; those that changed longest ago are dropped for them. Raises
        sqlite3.Error, OSError; nothing has changed then."""
        self._guarded(lambda db: self._put(db, rows))

    def find(self, record_id: str) -> R | None:
        """The record of an id. Raises sqlite3.Error, OSError."""

        def select(db: sqlite3.Connection) -> bytes | None:
            row = db.execute(f"SELECT record FROM {self._name} WHERE id = ?", (record_id,)).fetchone()
            return None if row is None else row[0]

        data = self._guarded(select)
        record = None if data is None else self._decoded(record_id, data)
        if record is not None and not self._has_ended_interrupted:  # nothing was written since the start
            record.end()
        return record

    def delete(self, record_id: str, owner: str | None = None) -> bool:
        """Deletes a record of an owner; None: of any. Returns whether there was one. Raises sqlite3.Error,
        OSError."""

        def delete(db: sqlite3.Connection) -> tuple[str, int] | None:
            row: tuple[str, int] | None = db.execute(
                f"DELETE FROM {self._name} WHERE id = ? AND owner = coalesce(?, owner) RETURNING owner, size",
                (record_id, owner),
            ).fetchone()
            return row

        if (row := self._guarded(delete)) is None:
            return False
        self.kept.add(row[0], -row[1], -1)
        return True

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._close()

    def _guarded(self, call: Callable[[sqlite3.Connection], T]) -> T:
        """`call` with the open database. A damaged file goes to quarantine, and the call gets a new one."""
        with self._lock:
            try:
                return call(self._opened())
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in DAMAGED:
                    raise
                self._close()
                self._set_aside(str(error))
                return call(self._opened())

    def _opened(self) -> sqlite3.Connection:
        if self._db is not None and self._file != _identity(self.path):
            self._close()
        if self._db is None:
            if os.path.lexists(self.path) and not is_regular(self.path):
                self._set_aside("it is no file")
            os.close(open_private(self.path, os.O_RDWR | os.O_CREAT))
            db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=1.0)
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            self._db, self._file = db, _identity(self.path)
        return self._db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(
            f"CREATE TABLE IF NOT EXISTS {self._name} (n INTEGER PRIMARY KEY AUTOINCREMENT, "
            "id TEXT UNIQUE, is_over INTEGER, size INTEGER, record BLOB, owner TEXT NOT NULL DEFAULT '')"
        )
        if "owner" not in [column[1] for column in db.execute(f"PRAGMA table_info({self._name})")]:
            # the file is of a server whose responses had no owners
            db.execute(f"ALTER TABLE {self._name} ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
        db.execute(f"CREATE INDEX IF NOT EXISTS by_owner ON {self._name} (owner, n)")
        self.kept.clear()
        for owner, count, size in db.execute(
            f"SELECT owner, count(*), CAST(total(size) AS INTEGER) FROM {self._name} GROUP BY owner"
        ).fetchall():
            self.kept.add(owner, size, count)

    def end_interrupted(self) -> None:
        """Ends the records that a server left open which was stopped; the first `put` does it otherwise.
        Raises sqlite3.Error, OSError."""
        self._guarded(self._end_interrupted)

    def _end_interrupted(self, db: sqlite3.Connection) -> None:
        rows = (
            []
            if self._has_ended_interrupted
            else db.execute(f"SELECT n, id, record FROM {self._name} WHERE NOT is_over").fetchall()
        )
        for n, record_id, data in rows:
            record = self._decoded(record_id, data)
            if record is not None:
                record.end()
                data = msgspec.json.encode(record)
            db.execute(f"UPDATE {self._name} SET is_over = 1, record = ? WHERE n = ?", (data, n))
        self._has_ended_interrupted = True

    def _put(self, db: sqlite3.Connection, rows: Iterable[Row]) -> None:
        self._end_interrupted(db)
        kept = self.kept.copy()
        db.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                old = db.execute(
                    f"DELETE FROM {self._name} WHERE id = ? RETURNING owner, size", (row.id,)
                ).fetchone()
                if old is not None:
                    kept.add(old[0], -old[1], -1)
                db.execute(
                    f"INSERT INTO {self._name} (is_over, size, record, id, owner) VALUES (?, ?, ?, ?, ?)",
                    (row.is_over, len(row.data), row.data, row.id, row.owner),
                )
                kept.add(row.owner, len(row.data))
                while kept.is_over(row.owner):
                    self._drop_oldest(db, kept, "WHERE owner = ?", row.owner)
            while kept.is_full:
                self._drop_oldest(db, kept, "")
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite has rolled back already after some errors
                db.execute("ROLLBACK")
            raise
        self.kept = kept

    def _drop_oldest(self, db: sqlite3.Connection, kept: Kept, where: str, *values: str) -> None:
        """Deletes the oldest of the rows that `where` selects, of which there is one at least."""
        owner, size = db.execute(
            f"DELETE FROM {self._name} WHERE n = (SELECT min(n) FROM {self._name} {where}) "
            "RETURNING owner, size",
            values,
        ).fetchone()
        kept.add(owner, -size, -1)

    def _decoded(self, record_id: str, data: bytes) -> R | None:
        """The record of a row; None for a damaged one, which stays in the file as it is."""
        try:
            return msgspec.json.decode(data, type=self._kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
            self.folder.report(f"row {record_id} of {self.path.name}", str(error), "it stays there")
            return None

    def _set_aside(self, reason: str) -> None:
        for end in ("", "-wal", "-shm"):
            path = self.path.with_name(self.path.name + end)
            if os.path.lexists(path):
                self.folder.quarantine(path, reason)

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
        self._db = self._file = None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
