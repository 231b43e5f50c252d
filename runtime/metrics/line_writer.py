"""Lines that are appended to files by a thread, so that no request waits for a disk.

A disk that is slow delays lines; over MAX_BYTES of waiting lines, and while a file can't be written, lines
are lost. The log says so once, and again when lines are written.
"""

import os
import threading
from collections import deque
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from runtime import log

MAX_BYTES = 64 * 2**20  # characters of lines that wait
LAST_LINES_S = 2.0  # to write what waits when the server stops


class LineWriter:
    """Appends lines to files, which only their owner can read, in the order of `put`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_lost = 0  # lines since the start
        self._waiting: deque[tuple[Path, str]] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_failing = False
        self._thread: threading.Thread | None = None

    def put(self, path: Path, line: str) -> None:
        """Has a line with its line break appended to a file soon."""
        with self._changed:
            if self._num_bytes + len(line) > self.max_bytes:
                self._lose(1, "they come faster than the disk takes them")
                return
            self._waiting.append((path, line))
            self._num_bytes += len(line)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="lines of requests")
            self._thread.start()

    def close(self, within_s: float = LAST_LINES_S) -> None:
        """Writes what waits, for LAST_LINES_S or `within_s` at most. Blocking."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(min(within_s, LAST_LINES_S))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                lines, self._waiting = self._waiting, deque()
            for path, group in groupby(lines, itemgetter(0)):
                self._append(path, [line for _, line in group])

    def _append(self, path: Path, lines: list[str]) -> None:
        text = "".join(lines)
        try:
            append(path, text)
        except OSError as error:
            with self._changed:
                self._lose(len(lines), (error.strerror or "an error of the disk").lower())
        else:
            if self._is_failing:
                self._is_failing = False
                log.get("requests").info("lines are written again", lost=self.num_lost)
        with self._changed:
            self._num_bytes -= len(text)

    def _lose(self, number: int, reason: str) -> None:
        self.num_lost += number
        if not self._is_failing:
            log.get("requests").warning("lines are lost: they cannot be written", reason=reason)
        self._is_failing = True


def append(file: Path, text: str) -> None:
    """Appends text to a file, which only its owner can read; after an error the file is as it was, as far as
    that is possible. Raises OSError."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        view = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)
