"""The fork server of ranks: a process that has imported what ranks of its device need, and forks on request.

    rank 0 ──imports──┬──► loads its model
                      └──fork──► fork server ──fork──► standby rank, rank of a later generation, ...

Forks share the memory of what was imported, and start in milliseconds. The fork server and its forks have the
parent of rank 0, as processes that the parent started would: the parent waits for them and the kernel kills
them when it ends. All of it is for processes of one thread that have touched no device.

A request is a ForkRequest, with the descriptors that a fork inherits. The answer is its process id, or an
error number below 0. The fork server writes its own process id first, and ends when the socket is closed.
"""

import ctypes
import fcntl
import os
import platform
import signal
import socket
from collections.abc import Sequence

import msgspec
from msgspec import Struct

CLONE_PARENT = 0x8000  # linux/sched.h
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # None: this machine has no fork servers
MAX_REQUEST_BYTES = 1 << 16
MAX_FDS = 200  # of one request; the kernel takes 253
CHANNEL = 3  # the socket's descriptor in a fork server


class ForkRequest(Struct, frozen=True):
    """What a fork is to be."""

    arguments: list[str]  # of ranks/worker.py
    fds: list[int]  # the numbers that the descriptors of the request get in the fork


def fork_as_sibling() -> int:
    """fork(), with this process's parent as the parent of the child: -> 0 in the child, else its process id.
    For a process of one thread, on a machine that has SYS_CLONE. Raises OSError."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid


def may_fork() -> bool:
    """Whether this process has one thread, and its machine a way to fork."""
    return SYS_CLONE is not None and len(os.listdir("/proc/self/task")) == 1


def take_descriptors(channel: int) -> socket.socket:
    """The socket `channel` of a new fork server, which has no other descriptor left but the standard ones."""
    os.dup2(channel, CHANNEL, inheritable=False)
    os.closerange(CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    return socket.socket(fileno=CHANNEL)


def send_request(channel: socket.socket, arguments: Sequence[str], fds: Sequence[int]) -> None:
    """Asks for a rank with these arguments and descriptors. Raises OSError."""
    body = msgspec.json.encode(ForkRequest(list(arguments), list(fds)))
    assert len(body) < MAX_REQUEST_BYTES
    socket.send_fds(channel, [body], list(fds))


def receive_arguments(channel: int) -> list[str] | None:
    """What the one request of the socket `channel` asks this process to be: its arguments. It has the
    request's descriptors then. None: the socket was closed."""
    with socket.socket(fileno=channel) as end:
        body, received, _, _ = socket.recv_fds(end, MAX_REQUEST_BYTES, MAX_FDS)
    if not body:
        return None
    request = msgspec.json.decode(body, type=ForkRequest)
    give_numbers(received, request.fds)
    return request.arguments


def serve_forks(channel: socket.socket) -> list[str] | None:
    """Answers requests. -> in each fork, its arguments; in the fork server None, when the socket was
    closed"""
    channel.send(str(os.getpid()).encode())
    while True:
        body, received, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, MAX_FDS)
        if not body:
            return None
        request = msgspec.json.decode(body, type=ForkRequest)
        try:
            answer = fork_as_sibling()
        except OSError as error:
            answer = -(error.errno or 1)
        if answer == 0:
            channel.close()
            os.setpgid(0, 0)
            give_numbers(received, request.fds)
            return request.arguments
        for fd in received:
            os.close(fd)
        channel.send(str(answer).encode())


def give_numbers(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Moves open descriptors to `numbers`, whatever of these is taken by another of them."""
    above = max((*numbers, *fds), default=0) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
