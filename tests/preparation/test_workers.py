"""Children that prepare several files: how many, one at a time, and none after a fault."""

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from runtime.preparation.workers import MAX_FILES, MAX_IDLE, Workers

PID = struct.Struct("i")
SOUND, FAULTY, ENDS = b"sound", b"faulty", b"ends"


def run(data: bytes, fds: list[int]) -> bool:
    """Says which process this is, and for ENDS waits until it is told to go on."""
    with socket.socket(fileno=fds[0]) as reply:
        reply.send(PID.pack(os.getpid()))
        if data == ENDS:
            reply.recv(1)
    return data != FAULTY


class Files:
    """Gives files to children, and waits for what they say."""

    def __init__(self) -> None:
        self.connection, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.workers = Workers(self.connection, 100, lambda: None, run)

    def begin(self, data: bytes, *, is_small: bool = True) -> tuple[int, socket.socket]:
        """-> the process that has the file, and the socket on which it waits"""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(30)
        with theirs:
            self.workers.give(data, [theirs.fileno()], is_small=is_small)
        return PID.unpack(ours.recv(PID.size))[0], ours

    def whole(self, data: bytes = SOUND, *, is_small: bool = True) -> int:
        """-> the process that had the file, which has said so or ended"""
        pid, ours = self.begin(data, is_small=is_small)
        with ours:
            assert ours.recv(1) == b""
        while self.workers._busy:
            self.workers._collect()
        return pid


@pytest.fixture
def files() -> Iterator[Files]:
    one = Files()
    yield one
    for worker in [*one.workers._idle, *one.workers._busy, one.connection, one._other]:
        worker.close()
    try:
        while True:
            os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass


def test_a_child_has_many_small_files_and_then_another_one_has(files: Files) -> None:
    pids = [files.whole() for _ in range(MAX_FILES + 1)]
    assert len(set(pids[:-1])) == 1 and pids[-1] != pids[0]


def test_a_child_with_a_fault_has_no_other_file(files: Files) -> None:
    first, second, third = (files.whole(data) for data in (SOUND, FAULTY, SOUND))
    assert first == second != third


def test_a_large_file_has_a_child_of_its_own(files: Files) -> None:
    small, large = files.whole(), files.whole(is_small=False)
    assert large != small == files.whole()


def test_a_child_has_one_file_at_a_time(files: Files) -> None:
    """And no more than some wait for others."""
    begun = [files.begin(ENDS) for _ in range(MAX_IDLE + 1)]
    assert len({pid for pid, _ in begun}) == MAX_IDLE + 1
    for _, ours in begun:
        with ours:
            ours.send(b"x")
            assert ours.recv(1) == b""
    assert files.whole() in {pid for pid, _ in begun}
    assert len(files.workers._idle) == MAX_IDLE
