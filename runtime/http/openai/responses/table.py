"""The responses of a SQLite file. Everything here blocks; ResponseStore calls it in threads."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from runtime.http.openai.responses.items import Item
from runtime.http.openai.stored.folder import Folder, is_regular, open_private
from runtime.http.openai.stored.quota import Kept

INTERRUPTED = {"code": "server_error", "message": "the server was stopped before the answer was complete"}
OPEN = ("queued", "in_progress")
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
NAMES = ("responses.sqlite", "responses.sqlite-wal", "responses.sqlite-shm")
T = TypeVar("T")


class StoredResponse(Struct, frozen=True):
    """A response and the conversation before it."""

    response: dict[str, object]
    context: list[Item]  # items of earlier responses, without instructions
    input: list[Item]
    owner: str = ""  # name of its tenant; "": of a server without keys, or before responses had owners

    @property
    def id(self) -> str:
        """The response id."""
        return str(self.response["id"])

    @property
    def conversation(self) -> list[Item]:
        """The items of the whole conversation, this response included."""
        return [*self.context, *self.input, *self.response["output"]]  # type: ignore[misc]


class Row(Struct, frozen=True):
    """A stored response as it is written."""

    id: str
    owner: str
    is_over: bool
    data: bytes  # of a StoredResponse


class ResponseTable:
    """Responses in a file of the folder. It is opened by the first call, and again when it was damaged (it
    goes to quarantine then) or replaced. Calls do not wait for the disk: a crash of the machine may lose the
    last rows."""

    def __init__(self, folder: Folder, kept: Kept) -> None:
        """`kept` counts the rows and bounds them."""
        self.folder = folder
        self.path = folder.path / NAMES[0]
        self.kept = kept
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the open database
        self._has_ended_interrupted = False
        self._lock = threading.Lock()

    def put(self, rows: Iterable[Row]) -> None:
        """Stores responses, or their new states; the oldest are dropped for them. Raises sqlite3.Error,
        OSError; nothing has changed then."""
        self._guarded(lambda db: self._put(db, rows))

    def find(self, response_id: str) -> StoredResponse | None:
        """The stored response of an id. Raises sqlite3.Error, OSError."""
        row = self.find_row(response_id)
        record = None if row is None else self._decoded(response_id, row.data)
        if record is not None and not self._has_ended_interrupted:  # nothing was written since the start
            _end(record)
        return record

    def find_row(self, response_id: str) -> Row | None:
        """The stored response of an id as it was written. Raises sqlite3.Error, OSError."""

        def select(db: sqlite3.Connection) -> tuple[str, bool, bytes] | None:
            row: tuple[str, bool, bytes] | None = db.execute(
                "SELECT owner, is_over, record FROM responses WHERE id = ?", (response_id,)
            ).fetchone()
            return row

        found = self._guarded(select)
        return None if found is None else Row(response_id, *found)

    def delete(self, response_id: str, owner: str | None = None) -> bool:
        """Deletes a response of an owner; None: of any. Returns whether there was one. Raises sqlite3.Error,
        OSError."""

        def delete(db: sqlite3.Connection) -> tuple[str, int] | None:
            row: tuple[str, int] | None = db.execute(
                "DELETE FROM responses WHERE id = ? AND owner = coalesce(?, owner) RETURNING owner, size",
                (response_id, owner),
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
            "CREATE TABLE IF NOT EXISTS responses (n INTEGER PRIMARY KEY AUTOINCREMENT, "
            "id TEXT UNIQUE, is_over INTEGER, size INTEGER, record BLOB, owner TEXT NOT NULL DEFAULT '')"
        )
        if "owner" not in [column[1] for column in db.execute("PRAGMA table_info(responses)")]:
            # the file is of a server whose responses had no owners
            db.execute("ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
        db.execute("CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, n)")
        self.kept.clear()
        for owner, count, size in db.execute(
            "SELECT owner, count(*), CAST(total(size) AS INTEGER) FROM responses GROUP BY owner"
        ).fetchall():
            self.kept.add(owner, size, count)

    def end_interrupted(self) -> None:
        """Ends the responses that a server left open which was stopped; the first `put` does it otherwise.
        Raises sqlite3.Error, OSError."""
        self._guarded(self._end_interrupted)

    def _end_interrupted(self, db: sqlite3.Connection) -> None:
        rows = (
            []
            if self._has_ended_interrupted
            else db.execute("SELECT n, id, record FROM responses WHERE NOT is_over").fetchall()
        )
        for n, response_id, data in rows:
            record = self._decoded(response_id, data)
            if record is not None:
                _end(record)
                data = msgspec.json.encode(record)
            db.execute("UPDATE responses SET is_over = 1, record = ? WHERE n = ?", (data, n))
        self._has_ended_interrupted = True

    def _put(self, db: sqlite3.Connection, rows: Iterable[Row]) -> None:
        self._end_interrupted(db)
        kept = self.kept.copy()
        db.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                values = (row.is_over, len(row.data), row.data, row.id)
                old = db.execute("SELECT size FROM responses WHERE id = ?", (row.id,)).fetchone()
                if old is not None:
                    db.execute("UPDATE responses SET is_over = ?, size = ?, record = ? WHERE id = ?", values)
                    kept.add(row.owner, len(row.data) - old[0], 0)
                else:
                    db.execute(
                        "INSERT INTO responses (is_over, size, record, id, owner) VALUES (?, ?, ?, ?, ?)",
                        (*values, row.owner),
                    )
                    kept.add(row.owner, len(row.data))
                while kept.is_over(row.owner):
                    _drop_oldest(db, kept, "WHERE owner = ?", row.owner)
            while kept.is_full:
                _drop_oldest(db, kept, "")
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite has rolled back already after some errors
                db.execute("ROLLBACK")
            raise
        self.kept = kept

    def _decoded(self, response_id: str, data: bytes) -> StoredResponse | None:
        """The record of a row; None for a damaged one, which stays in the file as it is."""
        try:
            return msgspec.json.decode(data, type=StoredResponse)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
            self.folder.report(f"row {response_id} of {NAMES[0]}", str(error), "it stays there")
            return None

    def _set_aside(self, reason: str) -> None:
        for name in NAMES:
            if os.path.lexists(self.folder.path / name):
                self.folder.quarantine(self.folder.path / name, reason)

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
        self._db = self._file = None


def _end(record: StoredResponse) -> None:
    """Ends a response that was interrupted."""
    if record.response["status"] in OPEN:
        record.response.update(status="failed", error=INTERRUPTED)


def _drop_oldest(db: sqlite3.Connection, kept: Kept, where: str, *values: str) -> None:
    """Deletes the oldest of the rows that `where` selects, of which there is one at least."""
    owner, size = db.execute(
        f"DELETE FROM responses WHERE n = (SELECT min(n) FROM responses {where}) RETURNING owner, size",
        values,
    ).fetchone()
    kept.add(owner, -size, -1)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
