"""Python in worker threads, without holding up the event loop.

Threads share the interpreter: one of them at a time runs Python, with the global interpreter lock (GIL). A
thread that wants the lock gets it after the switch interval of 5 ms, and again the other way round. So next
to a thread that runs Python without end the event loop has half the time, and waits whenever it has looked at
its sockets. Therefore what runs long in a worker thread calls `give_way` every few rows: the loop takes the
lock in these pauses, and keeps it for as long as it has something to do. Calls of C that hold the lock must
be short: what is large is made in pieces.
"""

import math
import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")

RUN_S = 0.0005  # that a worker thread runs Python between two pauses
PAUSE_S = 0.0001  # a thread that waits for the lock wakes up meanwhile, and has it


class _Pauses(threading.local):
    due_s = math.inf  # when this thread makes its next pause; never, where the loop runs


_pauses = _Pauses()


def giving_way(function: Callable[[*Args], T], *args: *Args) -> T:
    """Calls `function` in this worker thread, where calls of `give_way` make pauses meanwhile. Raises what
    it raises."""
    _pauses.due_s = perf_counter() + RUN_S
    try:
        return function(*args)
    finally:
        _pauses.due_s = math.inf


def give_way() -> None:
    """Lets the event loop run, within `giving_way`, when that is due. Does nothing elsewhere."""
    if perf_counter() >= _pauses.due_s:
        sleep(PAUSE_S)
        _pauses.due_s = perf_counter() + RUN_S
