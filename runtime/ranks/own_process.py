"""What a rank's process asks of the kernel about itself. Torch-free."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_NAME = 15


def bind_to_parent(parent_pid: int, name: str) -> bool:
    """Asks the kernel to kill this process when the parent's thread that started it ends. False: it has ended
    already."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    set_process_name(name)
    return os.getppid() == parent_pid


def set_process_name(name: str) -> None:
    """Sets the name by which ps and top show this process; at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def exit_now(code: int) -> NoReturn:
    """Ends the process without unloading libraries, which may take long, or hang after a failure."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk must not keep the process alive
            stream.flush()
    os._exit(code)
