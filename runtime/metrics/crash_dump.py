"""--crash-dump-folder: when ranks die, the requests that run and those that ended in the last five minutes
are written to a file.

Requests go on while ranks are started again, so the event loop takes a snapshot only; a thread makes the
lines and writes them. What is kept for a dump is bounded in number and in bytes, and so is the number of
dumps that wait for a slow disk.
"""

from collections import deque
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from threading import Thread
from time import monotonic

import numpy as np
from msgspec import Raw

from runtime import log
from runtime.errors import RankDied
from runtime.json_value import Fields
from runtime.messages.requests import Chat, Embeds, Infill, Pair, Prompt, Text, Tokens
from runtime.metrics.line_writer import append
from runtime.metrics.request_records import Record, as_json

CRASH_S = 300.0  # time for which ended requests are kept
CRASH_REQUESTS = 10_000  # most ended requests that are kept
CRASH_BYTES = 64 * 2**20  # most bytes of their prompts and answers, about
RECORD_BYTES = 2048  # of a record without texts
MAX_DUMPS = 2  # dumps that may be under way
BLOCK_CHARS = 256 * 1024  # written at once
LAST_DUMPS_S = 10.0  # to write what waits when the server stops


class CrashDump:
    """Keeps what a dump needs, and writes dumps. All methods but `close` are called on the event loop."""

    def __init__(self, folder: Path, level: int, max_bytes: int = CRASH_BYTES) -> None:
        """`folder`: exists, and can be written to; `level`: --log-requests-level; `max_bytes`: of prompts and
        answers that are kept of ended requests."""
        self._folder = folder
        self._level = level
        self._max_bytes = max_bytes
        self._recent: deque[tuple[Record, int]] = deque()  # ended requests, and their bytes
        self._num_bytes = 0
        self._writing: list[Thread] = []

    def began(self, record: Record) -> None:
        """Does nothing."""

    def ended(self, record: Record) -> None:
        """Keeps the record for CRASH_S, and drops older ones while they are too many or too large."""
        size = size_of(record)
        self._recent.append((record, size))
        self._num_bytes += size
        while self._recent and (
            len(self._recent) > CRASH_REQUESTS
            or self._num_bytes > self._max_bytes
            or monotonic() - (self._recent[0][0].ended_s or 0.0) > CRASH_S
        ):
            self._num_bytes -= self._recent.popleft()[1]

    def dump(self, died: RankDied, running: list[Record]) -> None:
        """Starts to write a file of JSON lines: the death, then each request."""
        self._writing = [thread for thread in self._writing if thread.is_alive()]
        if len(self._writing) >= MAX_DUMPS:
            log.get("requests").warning(
                "the last requests are not written: earlier ones still are", rank=died.rank
            )
            return
        file = self._folder / f"crash-{datetime.now():%Y%m%d-%H%M%S-%f}.jsonl"
        since = monotonic() - CRASH_S
        records = [record for record, _ in self._recent if (record.ended_s or since) >= since]
        records += [_frozen(record) for record in running]
        thread = Thread(target=self._write, args=(file, died, records), daemon=True, name="crash dump")
        thread.start()
        self._writing.append(thread)

    def close(self, within_s: float) -> None:
        """Waits for dumps that are being written, for LAST_DUMPS_S or `within_s` at most. Blocking."""
        end_s = monotonic() + min(within_s, LAST_DUMPS_S)
        for thread in self._writing:
            thread.join(max(0.0, end_s - monotonic()))

    def _write(self, file: Path, died: RankDied, records: list[Record]) -> None:
        """Makes and writes the lines, a block at a time: between two blocks the event loop runs."""
        head = {"event": "crash", "rank": died.rank, "exit_code": died.exit_code, "reason": died.reason}
        lines, num_chars = [as_json(head) + "\n"], 0
        try:
            for record in records:
                lines.append(as_json(self._fields(record)) + "\n")
                num_chars += len(lines[-1])
                if num_chars > BLOCK_CHARS:
                    append(file, "".join(lines))
                    lines, num_chars = [], 0
            append(file, "".join(lines))
        except OSError as error:
            log.get("requests").error(
                "the last requests could not be written", file=str(file), reason=error.strerror
            )
            return
        log.get("requests").warning("the last requests were written", file=str(file), requests=len(records))

    def _fields(self, record: Record) -> Fields:
        return (
            {"state": "running" if record.ended_s is None else "ended", "began_at": record.began_at}
            | record.input_fields(self._level)
            | record.output_fields(self._level)
        )


def _frozen(record: Record) -> Record:
    """A copy of the record of a request that goes on."""
    texts = {index: list(parts) for index, parts in record.texts.items()}
    return replace(record, reasons=list(record.reasons), texts=texts)


def size_of(record: Record) -> int:
    """Bytes that a record keeps in memory, about."""
    answers = sum([len(part) for parts in record.texts.values() for part in parts])
    return RECORD_BYTES + _size_of_prompt(record.request.prompt) + answers


def _size_of_prompt(prompt: Prompt) -> int:
    match prompt:
        case Text(text=text):
            return len(text)
        case Tokens(ids=ids):
            return 8 * len(ids)
        case Infill(prefix=first, suffix=second) | Pair(text=first, second=second):
            return len(first) + len(second)
        case Embeds(rows=rows):
            return rows.nbytes if isinstance(rows, np.ndarray) else sum(map(_size_of_row, rows))
        case Chat(messages=messages, tools=tools):
            return _size_of_json([messages, tools])


def _size_of_row(row: object) -> int:
    """Bytes of a row of a record: a list of numbers, or its JSON."""
    return len(memoryview(row)) if isinstance(row, Raw) else _size_of_json(row)


def _size_of_json(value: object) -> int:
    """Characters of all texts of a JSON value, and 64 bytes for each value."""
    size, waiting = 0, [value]
    while waiting:
        match waiting.pop():
            case dict() as fields:
                waiting += [*fields.keys(), *fields.values()]
            case list() | tuple() as items:
                waiting += items
            case str() | bytes() as text:
                size += len(text)
        size += 64
    return size
