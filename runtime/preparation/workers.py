"""Children of the preparation process. Those that prepare small files are used again, since a fork takes many
times as long as such a file."""

import os
import socket
from collections.abc import Callable

MAX_FILES = 256  # of a child: what it does not give back of its memory ends with it
MAX_IDLE = 2  # children that wait; more of them end
IDLE = b"idle"  # what a child says when it has prepared a file

# prepares a file, which came as a message with descriptors; -> whether the child may prepare others
Run = Callable[[bytes, list[int]], bool]


class Workers:
    """Gives files to children, each of which has one at a time. One that ends takes its own file with it
    alone."""

    def __init__(
        self, connection: socket.socket, max_bytes: int, confine: Callable[[], None], run: Run
    ) -> None:
        """`connection`: that files come from, which children do not have; `max_bytes`: of a message;
        `confine`: takes from a child what it does not need; `run`: a child's work on a file."""
        self._connection, self._max_bytes = connection, max_bytes
        self._confine, self._run = confine, run
        self._idle: list[socket.socket] = []
        self._busy: list[socket.socket] = []

    def give(self, data: bytes, fds: list[int], *, is_small: bool) -> None:
        """Has a child prepare a file: one that waits where it `is_small`, else one of its own."""
        self._collect()
        while is_small and self._idle:
            worker = self._idle.pop()
            try:
                socket.send_fds(worker, [data], fds)
            except OSError:  # it has just ended
                worker.close()
            else:
                self._busy.append(worker)
                return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                for one in (ours, self._connection, *self._idle, *self._busy):
                    one.close()
                self._work(theirs, data, fds, MAX_FILES if is_small else 1)
            finally:
                os._exit(0)
        theirs.close()
        self._busy.append(ours)

    def _collect(self) -> None:
        """Finds out which children wait, and which have ended."""
        busy, self._busy = self._busy, []
        for worker in [*self._idle, *busy]:
            try:
                is_idle = worker.recv(len(IDLE), socket.MSG_DONTWAIT) == IDLE
            except BlockingIOError:
                if worker in busy:
                    self._busy.append(worker)
                continue
            if is_idle and len(self._idle) < MAX_IDLE:
                self._idle.append(worker)
            else:
                worker.close()
                if worker in self._idle:
                    self._idle.remove(worker)

    def _work(self, parent: socket.socket, data: bytes, fds: list[int], most: int) -> None:
        """All that a child does: up to `most` files."""
        self._confine()
        while self._run(data, fds) and (most := most - 1):
            parent.send(IDLE)
            data, fds, _, _ = socket.recv_fds(parent, self._max_bytes, 3)
            if not data:
                return
