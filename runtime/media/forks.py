"""Children that have bounds for what they take: processes that fork one for each request.

Such a process has one thread, and ends when its parent closes the socket.
"""

import ctypes
import faulthandler
import fcntl
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

NICENESS = 10  # these processes and their children leave the cores to the event loop and the ranks
MAX_OPEN_FILES = 32  # of a child
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38


class Bounds(Struct, frozen=True, kw_only=True):
    """What a child may take."""

    limit_s: float  # seconds until it is ended
    cpu_s: int  # seconds of a core
    memory_bytes: int  # beyond what it has when it starts
    file_bytes: int  # of memory without a name that it writes


def start(module: str, fd: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `python -m module --socket fd`. Ctrl-C is for the parent: the process has a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, "--socket", str(fd)],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[fd],
        process_group=0,
    )


def lower_priority() -> None:
    """Has this process give way to the event loop and the ranks from now on."""
    os.nice(NICENESS)


def forget_children() -> None:
    """Has children of this process leave nothing behind: of one its result is known, or its end, and no
    more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def serve(connection: socket.socket, max_bytes: int, run: Callable[[bytes, list[int]], None]) -> None:
    """Forks a child for each message of up to `max_bytes` until the parent closes the socket. `run` is all of
    the child's work, with the message and up to three descriptors that came with it."""
    forget_children()
    while True:
        data, fds, _, _ = socket.recv_fds(connection, max_bytes, 3)
        if not data:
            return
        if os.fork() == 0:
            try:
                connection.close()
                run(data, fds)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


def confine(bounds: Bounds) -> None:
    """Takes from this process what a child does not need."""
    faulthandler.disable()  # what a client sent is no fault of ours, and its stack not for our log
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    limit_time(bounds)
    own_bytes = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, own_bytes + bounds.memory_bytes),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def limit_time(bounds: Bounds) -> None:
    """Has this process end when it has taken the time of its bounds from now on."""
    signal.setitimer(signal.ITIMER_REAL, bounds.limit_s)  # SIGALRM ends it, however it waits
    used = resource.getrusage(resource.RUSAGE_SELF)
    until_s = math.ceil(used.ru_utime + used.ru_stime) + bounds.cpu_s
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]  # stays: a later file has its own time
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, most))  # SIGXCPU ends it


def end_with(reply: int, *, is_written_to: bool = False) -> None:
    """Has this process end when the other end of its socket is closed: the request has ended.
    `is_written_to`: the other end also writes, and the process ends between two calls of C; else in the
    middle of one."""
    closed = select.poll()
    closed.register(reply, select.POLLHUP)

    def end() -> None:
        if closed.poll(0):
            os._exit(0)

    signal.signal(signal.SIGIO, (lambda *_: end()) if is_written_to else signal.SIG_DFL)
    fcntl.fcntl(reply, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reply, fcntl.F_SETFL, fcntl.fcntl(reply, fcntl.F_GETFL) | os.O_ASYNC)
    end()  # it may have been closed before the signal was asked for


def go_on_after(reply: int) -> None:
    """Has this process go on when the other end of a socket of `end_with` is closed, and without a limit of
    its time while it waits."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(reply, fcntl.F_SETFL, fcntl.fcntl(reply, fcntl.F_GETFL) & ~os.O_ASYNC)
    signal.setitimer(signal.ITIMER_REAL, 0)
