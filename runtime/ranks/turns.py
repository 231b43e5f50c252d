"""Two computations of which one runs at a time: where one waits for other ranks, it passes the turn on.

    first    layers ... sum ──────────── waits | layers ... sum
    second                   layers ... sum ────────────── waits | layers ...
                                    ▲
             the first one's collective goes on while the second one is computed

The second computation has a thread of its own, so that neither needs to know of the other: a layer calls a
collective, and that passes the turn on. Turns pass at collectives alone, so the order in which all ranks call
these is the same.
"""

from collections.abc import Callable
from threading import Event, Semaphore, Thread, get_ident
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """One pair of computations, of the calling thread and of another one. Use it once."""

    def __init__(self) -> None:
        self._turns = Semaphore(0), Semaphore(0)
        self._has_ended = [False, False]
        self._failure: BaseException | None = None
        self._second_id = 0
        self._second: list[T] = []

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """The results of both. Raises what either raises; the other one then ends where it waits."""
        started = Event()
        thread = Thread(target=self._run_second, args=(second, started), name="second-batch")
        thread.start()
        started.wait()
        try:
            found = first()
        except BaseException as error:
            self._failure = self._failure or error
        self._has_ended[0] = True
        self._turns[1].release()
        thread.join()
        if self._failure is not None:
            raise self._failure
        return found, self._second[0]

    def pass_on(self) -> None:
        """Lets the other computation run until it passes the turn on, or ends. Raises what it raised."""
        own = int(get_ident() == self._second_id)
        if not self._has_ended[1 - own]:
            self._turns[1 - own].release()
            self._turns[own].acquire()
        if self._failure is not None:
            raise self._failure

    def _run_second(self, second: Callable[[], T], started: Event) -> None:
        self._second_id = get_ident()
        started.set()
        self._turns[1].acquire()
        try:
            if self._failure is None:
                self._second.append(second())
        except BaseException as error:
            self._failure = self._failure or error
        self._has_ended[1] = True
        self._turns[0].release()
