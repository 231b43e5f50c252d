"""Stored responses, which clients fetch again and continue: bounded, the oldest are dropped first."""

import sqlite3
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.errors import NotFound, StartError
from runtime.http.openai.responses.items import Item

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20
OPEN = ("queued", "in_progress")
INTERRUPTED = {"code": "server_error", "message": "the server was stopped before the answer was complete"}


class StoredResponse(Struct, frozen=True):
    """A response and the conversation before it."""

    response: dict[str, object]
    context: list[Item]  # items of earlier responses, without instructions
    input: list[Item]

    @property
    def id(self) -> str:
        """The response id."""
        return str(self.response["id"])

    @property
    def conversation(self) -> list[Item]:
        """The items of the whole conversation, this response included."""
        return [*self.context, *self.input, *self.response["output"]]  # type: ignore[misc]


class ResponseStore:
    """Responses in memory, or in a SQLite file that survives the server. Calls are short and do not wait for
    the disk: a crash of the machine, not of the server, may lose the last ones."""

    def __init__(
        self, path: Path | None, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        """Raises StartError when the file can't be used."""
        self.path = path
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._count = self._bytes = 0
        if path is not None:
            _ = self._db  # opens the file now, so that a bad one is refused at start

    @cached_property
    def _db(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self.path or ":memory:", isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(
                "CREATE TABLE IF NOT EXISTS responses (n INTEGER PRIMARY KEY AUTOINCREMENT, "
                "id TEXT UNIQUE, is_over INTEGER, size INTEGER, record BLOB)"
            )
            self._count, self._bytes = db.execute(
                "SELECT count(*), CAST(total(size) AS INTEGER) FROM responses"
            ).fetchone()
            _end_interrupted(db)
        except sqlite3.Error as error:
            raise StartError(
                f"{self.path} can't be used to store responses ({error}); move it away"
            ) from None
        return db

    def close(self) -> None:
        """Closes the file."""
        if "_db" in self.__dict__:
            self._db.close()

    def put(self, record: StoredResponse) -> None:
        """Stores a response, or its new state."""
        data = msgspec.json.encode(record)
        if len(data) > self.max_bytes:
            return
        is_over = record.response["status"] not in OPEN
        response_id = record.response["id"]
        if (
            row := self._db.execute("SELECT size FROM responses WHERE id = ?", (response_id,)).fetchone()
        ) is not None:
            self._db.execute(
                "UPDATE responses SET is_over = ?, size = ?, record = ? WHERE id = ?",
                (is_over, len(data), data, response_id),
            )
            self._bytes += len(data) - row[0]
        else:
            self._db.execute(
                "INSERT INTO responses (id, is_over, size, record) VALUES (?, ?, ?, ?)",
                (response_id, is_over, len(data), data),
            )
            self._count += 1
            self._bytes += len(data)
        while self._count > self.max_responses or self._bytes > self.max_bytes:
            self._drop_oldest()

    def find(self, response_id: str, param: str = "response_id") -> StoredResponse:
        """The stored response of an id. Raises NotFound."""
        row = self._db.execute("SELECT record FROM responses WHERE id = ?", (response_id,)).fetchone()
        if row is None:
            raise NotFound(f"there is no response {response_id[:80]} (any more)", param=param)
        return msgspec.json.decode(row[0], type=StoredResponse)

    def delete(self, response_id: str) -> None:
        """Deletes a response. Raises NotFound."""
        row = self._db.execute("DELETE FROM responses WHERE id = ? RETURNING size", (response_id,)).fetchone()
        if row is None:
            raise NotFound(f"there is no response {response_id[:80]} (any more)", param="response_id")
        self._count -= 1
        self._bytes -= row[0]

    def _drop_oldest(self) -> None:
        (size,) = self._db.execute(
            "DELETE FROM responses WHERE n = (SELECT min(n) FROM responses) RETURNING size"
        ).fetchone()
        self._count -= 1
        self._bytes -= size


def _end_interrupted(db: sqlite3.Connection) -> None:
    for n, data in db.execute("SELECT n, record FROM responses WHERE NOT is_over").fetchall():
        record = msgspec.json.decode(data, type=StoredResponse)
        record.response.update(status="failed", error=INTERRUPTED)
        db.execute(
            "UPDATE responses SET is_over = 1, record = ? WHERE n = ?", (msgspec.json.encode(record), n)
        )
