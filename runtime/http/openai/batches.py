"""/v1/batches: a file of requests, answered in idle time, into a file of responses.

    validating ─► in_progress ─► finalizing ─► completed
        │             ├─► cancelling ─► cancelled            by the client
        ▼             └─► expired                            after 24 hours
      failed

Two things survive a killed server: the record of the batch, written atomically at each change of status, and
the lines of its two output files, appended one by one. The next start truncates an incomplete last line and
continues with the input lines that have no answer; so the files have exactly one answer for each line. Lines
that were running are computed again.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Annotated as A
from typing import Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from runtime import log
from runtime.errors import InvalidRequest, NotFound
from runtime.http.openai.files import Files, new_id, write_atomically
from runtime.http.streaming.exchange import Answer
from runtime.service import Service

MAX_LINES = 50_000  # OpenAI's own limit
MAX_ERRORS = 100  # of a batch that fails its check
WINDOW_S = 24 * 3600

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED = ("failed", "completed", "expired", "cancelled")
Serve = Callable[[Service, bytes], Answer]


class BatchBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: A[dict[str, str], Meta(max_length=16)] | None = None
    output_expires_after: Any = None  # files stay until they are deleted


class LineError(Struct, frozen=True, kw_only=True):
    """What is wrong with a line of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(Struct, frozen=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, frozen=True, kw_only=True):
    """OpenAI's batch object."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None


class Record(Struct, kw_only=True):
    """A batch on disk: what clients see, and the ids of its output files before these are published."""

    batch: Batch
    output_id: str
    error_id: str


class Line(Struct, frozen=True):
    """A line of the input file. The body stays JSON, which the route decodes."""

    custom_id: A[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class Answered(Struct, frozen=True):
    """The id in a line of an output file."""

    custom_id: str


_line = msgspec.json.Decoder(Line)
_answered = msgspec.json.Decoder(Answered)


class Batches:
    """The batches of one folder, as records. Methods block where their docstring says so; BatchRunner runs
    them."""

    def __init__(self, files: Files, endpoints: Mapping[str, Serve]) -> None:
        self.files = files
        self.endpoints = endpoints
        self.folder = files.folder / "batches"
        self.folder.mkdir(exist_ok=True, mode=0o700)
        records = [record for path in self.folder.glob("*.json") if (record := _read(path)) is not None]
        self.known = {r.batch.id: r for r in sorted(records, key=lambda r: (r.batch.created_at, r.batch.id))}

    def find(self, batch_id: str) -> Record:
        """The record of a batch. Raises NotFound."""
        record = self.known.get(batch_id)
        if record is None:
            raise NotFound(f"there is no batch {batch_id[:80]}", param="batch_id")
        return record

    def create(self, body: BatchBody) -> Record:
        """Creates a batch. Blocking. Raises InvalidRequest, NotFound."""
        if body.endpoint not in self.endpoints:
            raise InvalidRequest(f"endpoint must be one of {', '.join(self.endpoints)}", param="endpoint")
        if self.files.find(body.input_file_id).purpose != "batch":
            raise InvalidRequest(
                "the input file must have been uploaded with purpose batch", param="input_file_id"
            )
        now = int(time.time())
        batch = Batch(
            id=new_id("batch"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
        )
        record = Record(batch=batch, output_id=new_id("file"), error_id=new_id("file"))
        self.known[batch.id] = record
        self.save(record)
        return record

    def advance(self, record: Record, status: Status, **fields: Any) -> None:
        """Gives a batch its next status, and the time of it. Blocking."""
        if status == record.batch.status:
            return
        record.batch = structs.replace(
            record.batch, status=status, **{f"{status}_at": int(time.time())}, **fields
        )
        self.save(record)

    def save(self, record: Record) -> None:
        """Writes the record to disk. Blocking."""
        write_atomically(self.folder / f"{record.batch.id}.json", msgspec.json.encode(record))

    def unfinished_files(self) -> list[str]:
        """Ids of the files that unfinished batches read or write."""
        return [
            name
            for r in self.known.values()
            if r.batch.status not in ENDED
            for name in (r.batch.input_file_id, r.output_id, r.error_id)
        ]

    def check(self, record: Record) -> list[LineError]:
        """Errors of the input file; also counts its lines. Blocking."""
        errors: list[LineError] = []
        seen: set[str] = set()
        total = 0
        for number, raw in _lines(self.files.path(record.batch.input_file_id)):
            total += 1
            if (error := self._line_error(number, raw, record.batch.endpoint, seen)) is not None:
                errors.append(error)
            if len(errors) == MAX_ERRORS or total > MAX_LINES:
                break
        if not total:
            errors.append(LineError(code="empty_file", message="the input file has no lines"))
        if total > MAX_LINES:
            errors.append(
                LineError(code="too_many_lines", message=f"the input file has more than {MAX_LINES} lines")
            )
        record.batch = structs.replace(record.batch, request_counts=Counts(total))
        return errors

    def _line_error(self, number: int, raw: bytes, endpoint: str, seen: set[str]) -> LineError | None:
        try:
            line = _line.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return LineError(code="invalid_json_line", message=str(error), line=number)
        if line.url != endpoint:
            return LineError(
                code="mismatched_endpoint",
                message=f"url must be {endpoint}, as the batch says",
                line=number,
                param="url",
            )
        if line.custom_id in seen:
            return LineError(
                code="duplicate_custom_id",
                message="another line has this custom_id",
                line=number,
                param="custom_id",
            )
        seen.add(line.custom_id)
        return None

    def recover(self, record: Record) -> Counts:
        """Truncates incomplete lines of the output files, and counts the answered lines. Blocking. Returns
        the counts."""
        ok, bad = (len(_answered_in(self.files.path(name))) for name in (record.output_id, record.error_id))
        record.batch = structs.replace(
            record.batch, request_counts=Counts(record.batch.request_counts.total, ok, bad)
        )
        return record.batch.request_counts

    def unanswered(self, record: Record) -> Generator[Line]:
        """Input lines without an answer, in order. Blocking."""
        done = {
            name for id in (record.output_id, record.error_id) for name in _answered_in(self.files.path(id))
        }
        for _, raw in _lines(self.files.path(record.batch.input_file_id)):
            line = _line.decode(raw)
            if line.custom_id not in done:
                yield line

    def append(self, record: Record, output: dict[str, Any], *, is_error: bool) -> None:
        """Appends one answer to an output file. Blocking."""
        with self.files.path(record.error_id if is_error else record.output_id).open("ab") as file:
            file.write(msgspec.json.encode(output) + b"\n")
        old = record.batch.request_counts
        counts = Counts(old.total, old.completed + (not is_error), old.failed + is_error)
        record.batch = structs.replace(record.batch, request_counts=counts)

    def publish(self, record: Record) -> dict[str, str]:
        """Makes files of the output files that have lines. Blocking. Returns their ids, as fields of the
        batch."""
        fields = {}
        for field, file_id, kind in (
            ("output_file_id", record.output_id, "output"),
            ("error_file_id", record.error_id, "error"),
        ):
            path = self.files.path(file_id)
            if file_id in self.files.known:
                fields[field] = file_id
            elif path.is_file() and path.stat().st_size:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                fields[field] = self.files.adopt(file_id, f"{record.batch.id}_{kind}.jsonl", "batch").id
        return fields


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, raw


def _answered_in(path: Path) -> list[str]:
    """The custom ids in an output file; an incomplete last line, left by a killed server, is cut off."""
    if not path.is_file():
        return []
    names, whole = [], 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            names.append(_answered.decode(raw).custom_id)
            whole += len(raw)
    if whole != path.stat().st_size:
        os.truncate(path, whole)
    return names


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.MsgspecError as error:
        log.get("files").warning(
            "the record of a batch can't be read, and is left alone", path=path.name, error=str(error)
        )
        return None
