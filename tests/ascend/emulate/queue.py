"""The lazy mode: launched work stays on its stream until the program waits for it, so a missing wait gives
wrong numbers each time.

`with lazily():` or SIM_NPU_LAZY=1. The queues are those of cann/streams.c, which knows the streams, events
and synchronisations that torch_npu uses, from Python and from its own C++. Copies from and to pinned memory
that do not block are queued like operators, so the host sees memory that it should not touch yet. Two things
are more lenient than hardware: polling an event makes it progress, and collectives run when they are called,
after the work before them.
"""

import ctypes
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_Runner = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)
_numbers = itertools.count(1)
_waiting: dict[int, Callable[[], None]] = {}
_keep: list[Any] = []  # callbacks that C holds
_failed: list[BaseException] = []


@cache
def library() -> ctypes.CDLL:
    """The simulated runtime."""
    found = ctypes.CDLL(os.path.join(os.environ["SIM_CANN_LIBRARIES"], "libascendcl.so"))
    found.sim_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_long]
    found.sim_drain.argtypes = found.sim_advance.argtypes = [ctypes.c_void_p]
    return found


def install() -> None:
    """Lets the simulated runtime call queued work."""

    def run(number: int) -> int:
        try:
            with torch.inference_mode():
                _waiting.pop(number)()
        except BaseException as error:  # the device reports it when the host next waits
            traceback.print_exc(file=sys.stderr)
            _failed.append(error)
            return 1
        return 0

    _keep.append(_Runner(run))
    library().sim_set_runner(_keep[-1])


def is_lazy() -> bool:
    """Whether work waits until the program waits for it."""
    return bool(library().sim_is_lazy())


@contextmanager
def lazily() -> Iterator[None]:
    """Turns the lazy mode on."""
    library().sim_set_lazy(1)
    try:
        yield
    finally:
        library().sim_set_lazy(0)


def settle() -> None:
    """Waits for collectives that torch_npu launches from its own queue (TASK_QUEUE_ENABLE), on another
    thread, while the emulation computes on this one. Not in a capture."""
    if os.environ.get("TASK_QUEUE_ENABLE", "1") != "0":
        torch.npu.synchronize()


def stream_address(stream: Any = None) -> int:
    """The address of a stream; None: the current one's."""
    return (torch.npu.current_stream() if stream is None else stream).npu_stream


def enqueue(work: Callable[[], None], stream: Any = None) -> None:
    """Queues work on a stream."""
    number = next(_numbers)
    _waiting[number] = work
    library().sim_enqueue(stream_address(stream), number)


def advance(stream: Any) -> None:
    """Runs the work of a stream that need not wait for another one, before work launched earlier
    elsewhere."""
    if library().sim_advance(stream_address(stream)):
        raise _failed[-1] if _failed else RuntimeError("the order of a stream's work is wrong: see stderr")


def drain() -> None:
    """Runs the work of the current stream, as a blocking copy does first."""
    if library().sim_drain(stream_address()):
        raise _failed[-1]
