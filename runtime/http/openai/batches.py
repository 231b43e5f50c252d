"""/v1/batches: a file of requests, answered in idle time, into a file of responses.

    validating ─► in_progress ─► finalizing ─► completed
        │             ├─► cancelling ─► cancelled            by the client
        ▼             └─► expired                            after 24 hours
      failed

Two things survive a killed server: the record of the batch, written atomically at each change of status, and
the lines of its two output files, appended one by one. The next start truncates an incomplete last line,
moves damaged ones to quarantine, and continues with the input lines that have no answer; so the files have
exactly one answer for each line. Lines that were running are computed again.

A change of status is made in memory first, on the event loop, and then written. While the disk takes nothing,
the record on it is an earlier one: a server that starts from that repeats what it does not show.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct, structs

from runtime.errors import InvalidRequest, NotFound, Overloaded, StorageFull, StorageUnavailable
from runtime.http.openai.batch_lines import (
    MAX_LINE_BYTES,
    BrokenInput,
    Line,
    LineError,
    answered_in,
    checked_line,
    custom_id,
    line_error,
    lines_of,
    take_out,
)
from runtime.http.openai.files import FileId, Files, new_id
from runtime.http.openai.stored.folder import append_lines, is_regular, open_private, write_atomically
from runtime.http.streaming.exchange import Answer
from runtime.json_value import JsonDict, JsonValue
from runtime.messages.tenants import Tenant
from runtime.service import Service

MAX_LINES = 50_000  # OpenAI's own limit
MAX_ERRORS = 100  # of a batch that fails its check
MAX_UNFINISHED = 1024  # batches
MAX_KEPT = 10_000  # batches; of those that have ended, the oldest are forgotten
WINDOW_S = 24 * 3600
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")  # of OpenAI's batches

MESSAGES = "msgbatch"  # the first letters of the ids of Anthropic's batches

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
    output_expires_after: JsonValue = None  # files stay until they are deleted


class Counts(Struct, frozen=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, frozen=True, kw_only=True):
    """OpenAI's batch object."""

    id: A[str, Meta(pattern=r"^(msg)?batch_[0-9A-Za-z_-]+$")]
    object: str = "batch"
    endpoint: str
    errors: JsonDict | None = None
    input_file_id: FileId
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
    output_id: FileId
    error_id: FileId
    owner: str = ""  # as in StoredFile.owner
    num_cut_off: int = 0  # lines without an answer of a batch that was cancelled or has expired

    @property
    def is_messages(self) -> bool:
        """Whether it is one of Anthropic's, which OpenAI's routes do not show."""
        return self.batch.id.startswith(MESSAGES)


class Batches:
    """The batches of one folder, as records. Methods that block say so; they run in threads, one at a time
    for each change of files. BatchRunner runs the batches."""

    def __init__(
        self, files: Files, endpoints: Mapping[str, Serve], max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        """Blocking."""
        self.files = files
        self.max_line_bytes = max_line_bytes
        self.endpoints = endpoints
        self.folder = files.folder / "batches"
        paths = sorted(self.folder.glob("*.json"))
        found = [
            files.disk.folder.read_record(path, Record, lambda record: record.batch.id) for path in paths
        ]
        records = [record for record in found if record is not None]
        self.is_damaged = len(records) < len(paths)
        self.known = {r.batch.id: r for r in sorted(records, key=lambda r: (r.batch.created_at, r.batch.id))}
        self.lock = threading.Lock()  # held while a thread writes a record or an output file
        self._sealed: set[str] = set()  # ids of batches to whose output nothing is appended any more

    def find(self, batch_id: str, tenant: Tenant, *, is_messages: bool = False) -> Record:
        """The record of a batch. Raises NotFound, also for a batch of another tenant or API."""
        record = self.known.get(batch_id)
        if record is None or not tenant.sees(record.owner) or record.is_messages != is_messages:
            raise NotFound(f"there is no batch {batch_id[:80]}", param="batch_id")
        return record

    def draft(self, body: BatchBody, tenant: Tenant) -> Record:
        """The record of a new batch, which exists when it is saved and known. Raises InvalidRequest,
        NotFound."""
        if body.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        if self.files.find(body.input_file_id, tenant, "input_file_id").purpose != "batch":
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
        return Record(batch=batch, output_id=new_id("file"), error_id=new_id("file"), owner=tenant.name)

    async def create(self, record: Record, tenant: Tenant) -> None:
        """Stores a new batch, and forgets the oldest that has ended where there are too many. Raises
        Overloaded, StorageFull, StorageUnavailable; nothing is left of the batch then."""
        check_number(self.known.values(), tenant)
        await self.files.disk.run(lambda: self.save(record), undo=lambda _: self.erase(record))
        self.known[record.batch.id] = record
        if (old := one_too_many(list(self.known.values()), tenant)) is not None:
            with suppress(StorageFull, StorageUnavailable):  # the next batch tries again
                await self.files.disk.run(lambda: self.erase(old))
                self.known.pop(old.batch.id, None)

    def save(self, record: Record) -> None:
        """Writes the record, as it is then. Blocking. Raises OSError."""
        with self.lock:
            write_atomically(self.folder / f"{record.batch.id}.json", msgspec.json.encode(record))

    def erase(self, record: Record) -> None:
        """Deletes the record from the disk. Blocking. Raises OSError."""
        with self.lock:
            (self.folder / f"{record.batch.id}.json").unlink(missing_ok=True)

    def unfinished_files(self) -> list[str]:
        """Ids of the files that unfinished batches read or write."""
        return [
            name
            for r in self.known.values()
            if r.batch.status not in ENDED
            for name in (r.batch.input_file_id, r.output_id, r.error_id)
        ]

    def check(self, record: Record) -> tuple[int, list[LineError]]:
        """The number of lines of the input file, and their errors. Blocking. Raises BrokenInput, OSError."""
        errors: list[LineError] = []
        seen: set[str] = set()
        total = 0
        with closing(self._input(record)) as lines:
            for number, raw in lines:
                total += 1
                error = line_error(number, raw, record.batch.endpoint, seen, self.max_line_bytes)
                if error is not None:
                    errors.append(error)
                if len(errors) == MAX_ERRORS or total > MAX_LINES:
                    break
        if not total:
            errors.append(LineError(code="empty_file", message="the input file has no lines"))
        if total > MAX_LINES:
            errors.append(
                LineError(code="too_many_lines", message=f"the input file has more than {MAX_LINES} lines")
            )
        return total, errors

    def unanswered(self, record: Record) -> Generator[Line]:
        """Input lines without an answer, in order. Blocking. Raises BrokenInput, OSError."""
        done = {name for path in self._outputs(record) for name in answered_in(path)}
        with closing(self._input(record)) as lines:
            for number, raw in lines:
                line = checked_line(number, raw)
                if line.custom_id not in done:
                    yield line

    def recover(self, record: Record, *, seals: bool = False) -> Counts:
        """Repairs the output files: cuts off an incomplete last line, and moves damaged lines to quarantine.
        `seals`: nothing is appended any more. Blocking. Returns the counts of lines. Raises OSError."""
        with self.lock:
            if seals:
                self._sealed.add(record.batch.id)
            ok, bad = (self._repair(path) for path in self._outputs(record))
        return Counts(record.batch.request_counts.total, ok, bad)

    def append(self, record: Record, file_id: str, data: bytes) -> None:
        """Appends lines to an output file, unless it is sealed. Blocking. Raises OSError."""
        if record.batch.id not in self._sealed:
            append_lines(self.files.path(file_id), data)

    def cut_off(self, record: Record, code: str, message: str) -> None:
        """Gives every unanswered line an error, and seals the output files. Blocking. Raises BrokenInput,
        OSError."""
        error = {"code": code, "message": message}
        with self.lock:
            self._sealed.add(record.batch.id)
            outputs = [
                {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": None, "error": error}
                for line in self.unanswered(record)
            ]
            lines = b"".join(msgspec.json.encode(output) + b"\n" for output in outputs)
            append_lines(self.files.path(record.error_id), lines)

    def sizes(self, record: Record) -> dict[str, int]:
        """Bytes of the output files that have lines, which are on the disk then. Blocking. Raises OSError."""
        sizes = {}
        for path in self._outputs(record):
            if is_regular(path) and (size := path.stat().st_size):
                file = open_private(path, os.O_RDONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
                sizes[path.name] = size
        return sizes

    def _outputs(self, record: Record) -> tuple[Path, Path]:
        return self.files.path(record.output_id), self.files.path(record.error_id)

    def _input(self, record: Record) -> Generator[tuple[int, bytes]]:
        path = self.files.path(record.batch.input_file_id)
        if not is_regular(path):
            raise BrokenInput("the input file is gone")
        return lines_of(path)

    def _repair(self, path: Path) -> int:
        """Leaves only whole answers in an output file. Returns how many."""
        if not is_regular(path):
            if os.path.lexists(path):
                self.files.disk.folder.quarantine(path, "the output of a batch is no file")
            return 0
        bad: set[int] = set()  # numbers of lines
        seen: set[str] = set()
        whole = 0  # bytes of whole lines
        with path.open("rb") as file:
            for number, raw in enumerate(file):
                if not raw.endswith(b"\n"):
                    break
                whole += len(raw)
                name = custom_id(raw)
                if name is None or name in seen:
                    bad.add(number)
                else:
                    seen.add(name)
        if whole != path.stat().st_size:
            os.truncate(path, whole)
        if bad:
            damaged = take_out(path, bad)
            self.files.disk.folder.quarantine(
                damaged, f"{len(bad)} lines of the output of a batch are damaged"
            )
        return len(seen)


class Append:
    """One append to an output file of a batch. Blocking, and right to repeat: what a call has written that
    hung, or whose end was not awaited, is not written again."""

    def __init__(self, batches: Batches, record: Record, file_id: str, data: bytes) -> None:
        self._batches = batches
        self._record = record
        self._file_id = file_id
        self._data = data
        self._is_written = False

    def __call__(self) -> None:
        with self._batches.lock:
            if not self._is_written:
                self._batches.append(self._record, self._file_id, self._data)
                self._is_written = True


def advance(record: Record, status: Status, **fields: object) -> None:
    """Gives a batch its next status, and the time of it; it is saved apart from that."""
    if status != record.batch.status:
        record.batch = structs.replace(
            record.batch, status=status, **{f"{status}_at": int(time.time())}, **fields
        )


def batches_of(records: Iterable[Record], tenant: Tenant, *, is_messages: bool = False) -> list[Record]:
    """The records that exist for a tenant, the oldest first: OpenAI's batches, or Anthropic's."""
    return [one for one in records if tenant.sees(one.owner) and one.is_messages == is_messages]


def check_number(records: Iterable[Record], tenant: Tenant) -> None:
    """Raises Overloaded when a tenant may have no further batch that is not over."""
    owners = [record.owner for record in records if record.batch.status not in ENDED]
    num_own = owners.count(tenant.name)
    if len(owners) >= MAX_UNFINISHED or num_own >= tenant.most(MAX_UNFINISHED):
        raise Overloaded(
            f"as many batches are to be done as there may be, {num_own} of them yours; wait for some, or "
            "cancel them"
        )


def one_too_many(records: list[Record], tenant: Tenant) -> Record | None:
    """The oldest record that has ended, if a tenant has more records than its part or all are too many; the
    files of a batch stay."""
    own = [record for record in records if tenant.sees(record.owner)]
    if len(own) <= tenant.most(MAX_KEPT) and len(records) <= MAX_KEPT:
        return None
    return next((record for record in own if record.batch.status in ENDED), None)
