"""Runs operations of a grammar library such that one that does not end holds up nothing.

An operation on a grammar of a few hundred bytes can take minutes in one call, and a thread cannot be stopped.
But libraries let other threads run meanwhile. So the work of a step is done in a thread of its own; one whose
present operation has used LIMIT_S of the processor is left behind at the lowest priority, and the caller
goes on without the grammar that it was at. What is left behind ends at its next operation.
"""

import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from time import clock_gettime, pthread_getcpuclockid, thread_time
from typing import Generic, TypeVar

T = TypeVar("T")
C = TypeVar("C")

LIMIT_S = 1.0  # of the processor, for one operation; those of half the time end a sequence one by one
LOOK_S = 0.1  # between two looks at a thread that has not finished
MAX_LEFT = 8  # threads left behind that still run; more end the process
LOWEST = 19  # nice value


class StuckError(Exception, Generic[C]):
    """An operation takes too long. `culprit` is what it is an operation of."""

    def __init__(self, culprit: C) -> None:
        super().__init__("an operation takes too long")
        self.culprit = culprit


class LeftBehindError(Exception):
    """Raised in a thread that the work has been taken from."""


class Guard(Generic[C]):
    """A thread that works, and those that were left behind. `C`: what operations belong to."""

    def __init__(self, limit_s: float | None = None) -> None:
        """`limit_s`: LIMIT_S where it is not given."""
        self._limit_s = LIMIT_S if limit_s is None else limit_s
        self._left: list[Thread] = []
        self._worker: _Worker[C] | None = None

    def enter(self, culprit: C) -> float:
        """Called in the work before each operation that may take long. -> `thread_time`. Raises
        LeftBehindError."""
        worker = self._worker
        if worker is None or worker.thread.ident != get_ident():
            raise LeftBehindError
        worker.began_s = thread_time()
        worker.culprit = culprit
        return worker.began_s

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its exception. Raises StuckError when an operation takes too long, and
        RuntimeError when too many have."""
        worker = self._worker
        if worker is None:
            worker = self._worker = _Worker()
        worker.jobs.put(work)
        while not worker.done.acquire(timeout=LOOK_S):
            culprit = worker.culprit
            if culprit is not None and worker.cpu_s() - worker.began_s > self._limit_s:
                self._leave(worker)
                raise StuckError(culprit)
        if worker.error is not None:
            raise worker.error
        return worker.result  # type: ignore[return-value]

    def _leave(self, worker: "_Worker[C]") -> None:
        self._worker = None
        worker.jobs.put(None)
        if worker.thread.native_id is not None:
            os.setpriority(os.PRIO_PROCESS, worker.thread.native_id, LOWEST)
        self._left = [*(thread for thread in self._left if thread.is_alive()), worker.thread]
        if len(self._left) > MAX_LEFT:
            raise RuntimeError(f"{len(self._left)} operations on grammars do not end")


class _Worker(Generic[C]):
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self.jobs = SimpleQueue[Callable[[], object] | None]()
        self.done = Lock()
        self.done.acquire()
        self.result: object = None
        self.error: Exception | None = None
        self.culprit: C | None = None  # what the present operation belongs to; None: none is under way
        self.began_s = 0.0  # of the thread's processor time
        self.thread = Thread(target=self._run, daemon=True, name="grammars")
        self.thread.start()

    def cpu_s(self) -> float:
        """Processor time of the thread."""
        assert self.thread.ident is not None
        return clock_gettime(pthread_getcpuclockid(self.thread.ident))

    def _run(self) -> None:
        while (work := self.jobs.get()) is not None:
            self.result = self.error = None
            try:
                self.result = work()
            except LeftBehindError:
                return
            except Exception as error:
                self.error = error
            self.culprit = None
            self.done.release()
