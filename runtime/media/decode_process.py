"""The decode process: `python -m runtime.media.decode_process`, started by decoders.py when the first file
comes.

Decoders are C code that reads what strangers wrote. So each file is decoded in a child of this process, which
is forked with the libraries loaded, has bounds on its time, memory and descriptors, and may die. What it
decoded goes to the event loop as memory without a name, sealed against change.

This process has one thread, and ends when its parent closes the socket.
"""

import argparse
import ctypes
import faulthandler
import fcntl
import importlib
import os
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from runtime.media.decode import decode_file
from runtime.media.decode_messages import MAX_MESSAGE_BYTES, DecodeError, DecodeRequest, DecodeResult

NICENESS = 10  # children leave the cores to the event loop and the ranks
MAX_OPEN_FILES = 32  # of a child
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_LIBRARIES = ("runtime.media.images", "runtime.media.videos", "runtime.media.sounds")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38
_decoder = msgspec.msgpack.Decoder(DecodeRequest)


def serve(connection: socket.socket) -> None:
    """Forks a child for each request until the parent closes the socket. A request comes with two
    descriptors: the file, and the socket for its result."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is known of a child but its result, or its end
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
        if not data:
            return
        if os.fork() == 0:
            connection.close()
            _run_child(_decoder.decode(data), *fds)
        for fd in fds:
            os.close(fd)


def _run_child(request: DecodeRequest, file: int, reply: int) -> NoReturn:
    """The whole work of a child."""
    fd: list[int] = []
    try:
        _confine(request)
        _end_with(reply)
        result, values = decode_file(file, request)
        fd = [_sealed(values)]
    except DecodeError as error:
        result = DecodeResult(error=str(error)[:1000])
    except MemoryError:
        result = DecodeResult(error="takes too much memory when it is decoded; send a smaller one")
    except Exception:
        traceback.print_exc(file=sys.stderr)
        result = DecodeResult(error="could not be decoded; the server's log has the details", is_fault=True)
    with suppress(OSError), socket.socket(fileno=reply) as answer:  # the request may have ended
        socket.send_fds(answer, [msgspec.msgpack.encode(result)], fd)
    os._exit(0)


def _confine(request: DecodeRequest) -> None:
    """Takes from this process what a decoder does not need."""
    faulthandler.disable()  # what a client sent is no fault of ours, and its stack not for our log
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request.limit_s)  # SIGALRM ends it, however it waits
    own_bytes = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    limits = request.limits
    for kind, most in (
        (resource.RLIMIT_AS, own_bytes + limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.max_value_bytes),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    os.nice(NICENESS)


def _end_with(reply: int) -> None:
    """Has this process end when the other end of its socket is closed: the request has ended."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(reply, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reply, fcntl.F_SETFL, fcntl.fcntl(reply, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(reply, select.POLLHUP)
    if closed.poll(0):  # before the signal was asked for
        os._exit(0)


def _sealed(values: np.ndarray) -> int:
    """Memory without a name that holds an array, which this process cannot change any more."""
    fd = os.memfd_create("values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = np.ascontiguousarray(values).data.cast("B")
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def main() -> None:
    """Runs the process."""
    parser = argparse.ArgumentParser(
        prog="runtime.media.decode_process",
        description="Decodes images, videos and sounds; started by the runtime, not by hand.",
    )
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    arguments = parser.parse_args()
    for name in _LIBRARIES:
        with suppress(ImportError):  # a file that needs it is refused with what to install
            importlib.import_module(name)
    with socket.socket(fileno=arguments.socket) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
