"""Blocking calls on stored files: in threads of their own, for a limited time, with errors that clients can
act on.

A disk that hangs holds the threads that wait for it, and nothing else: further calls wait for a free thread,
and every call is given up after LIMIT_S. The threads are daemons, so that they do not hold up the end of the
process.
"""

import errno
import sqlite3
import threading
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import anyio

from runtime import log
from runtime.errors import RequestError, StorageFull, StorageUnavailable
from runtime.http.openai.stored.folder import Folder
from runtime.metrics import Metrics

NUM_THREADS = 8
LIMIT_S = 30.0  # that a call may take
LOG_AGAIN_S = 60.0  # the same kind of error is logged once in this time
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
T = TypeVar("T")


class Job(Generic[T]):
    """One call. It is over, or abandoned by the task that waits for it, whichever is first."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], None] | None) -> None:
        self.call = call
        self.undo = undo
        self.done = anyio.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        self._is_over = self._is_abandoned = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """In a thread: makes the call, and undoes it when its result is not wanted any more."""
        if self._is_abandoned:
            return
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error
        with self._lock:
            self._is_over = True
        if self._is_abandoned and self.error is None and self.undo is not None:
            self.undo(self.result)  # type: ignore[arg-type]

    def abandon(self) -> bool:
        """Gives the call up. False: it is over."""
        with self._lock:
            self._is_abandoned = not self._is_over
            return self._is_abandoned


AnyJob = Job[Any]  # of any result: who waits for it knows its type


class Disk:
    """Runs blocking calls on the files of a folder."""

    def __init__(self, folder: Folder, metrics: Metrics) -> None:
        self.folder = folder
        self.limit_s = LIMIT_S
        self._metrics = metrics
        self._free = anyio.Semaphore(NUM_THREADS)
        self._jobs: SimpleQueue[tuple[AnyJob, AbstractEventLoop | None] | None] = SimpleQueue()
        self._num_threads = 0
        self._logged_s: dict[str, float] = {}

    async def run(self, call: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """The result of `call`. When nothing waits for it any more, because the time is up or this task was
        cancelled, a call that has not begun is left out, and `undo` reverts one that comes to its end. Raises
        StorageFull, StorageUnavailable, and what else `call` raises."""
        job: Job[T] = Job(lambda: self._checked(call), undo)
        try:
            with anyio.move_on_after(self.limit_s):
                await self._free.acquire()
                self._start(job)
                await job.done.wait()
        finally:
            is_abandoned = job.abandon()
        if is_abandoned:
            raise self._counted(
                StorageUnavailable(
                    f"the disk of --file-storage-path has not answered for {self.limit_s:g} s; try later"
                )
            )
        if isinstance(job.error, OSError | sqlite3.Error):
            raise self._counted(storage_error(job.error)) from job.error
        if isinstance(job.error, StorageFull | StorageUnavailable):
            raise self._counted(job.error)
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    def soon(self, call: Callable[[], None]) -> None:
        """Makes a call at some time, without waiting for it; errors of the disk are ignored."""

        def run() -> None:
            with suppress(OSError, StorageFull, StorageUnavailable):
                self._checked(call)

        self._add_thread()
        self._jobs.put((Job(run, None), None))

    def close(self) -> None:
        """Unlocks the folder. Ends the threads that are idle, and the others when their call is over."""
        for _ in range(self._num_threads):
            self._jobs.put(None)
        self.folder.close()

    def _checked(self, call: Callable[[], T]) -> T:
        self.folder.check()
        return call()

    def _start(self, job: AnyJob) -> None:
        if self._free.value + self._num_threads < NUM_THREADS:  # all threads are busy
            self._add_thread()
        self._jobs.put((job, get_running_loop()))

    def _add_thread(self) -> None:
        if self._num_threads < NUM_THREADS:
            self._num_threads += 1
            threading.Thread(target=self._work, daemon=True, name="stored files").start()

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            job, loop = given
            job.run()
            if loop is None:
                continue
            try:
                loop.call_soon_threadsafe(self._finish, job)
            except RuntimeError:  # the loop is closed: the server has ended
                return

    def _finish(self, job: AnyJob) -> None:
        self._free.release()
        job.done.set()

    def _counted(self, error: RequestError) -> RequestError:
        """The error, counted; each kind is logged once in a while."""
        self._metrics.stored_object_disk_errors[
            "full" if isinstance(error, StorageFull) else "unavailable"
        ] += 1
        now = anyio.current_time()
        if now - self._logged_s.get(error.message, -LOG_AGAIN_S) >= LOG_AGAIN_S:
            self._logged_s = {error.message: now}
            log.get("files").error("stored objects can't be read or written", reason=error.message)
        return error


def storage_error(error: OSError | sqlite3.Error) -> StorageFull | StorageUnavailable:
    """What clients get for an error of the disk."""
    if isinstance(error, sqlite3.Error):
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return disk_full()
        return StorageUnavailable(f"the disk of --file-storage-path fails ({error}); {TRY_AGAIN}")
    if error.errno in FULL:
        return disk_full()
    reason = (error.strerror or type(error).__name__).lower()
    return StorageUnavailable(f"the disk of --file-storage-path fails ({reason}); {TRY_AGAIN}")


TRY_AGAIN = "the server's log has more; try again when it is repaired"


def disk_full() -> StorageFull:
    """The error of a full disk."""
    return StorageFull("the disk of --file-storage-path is full; delete some files, or make room on it")
