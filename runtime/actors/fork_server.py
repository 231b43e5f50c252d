"""The fork server of a replica's ranks (ranks/forks.py), seen from the event-loop process.

Rank 0 of the first generation is started by exec, and makes the fork server when it has imported what its
device needs. From then on standby ranks and later generations are forks of it. Where there is none, because
it has not come up or was killed, ranks are started by exec, as those of devices that cannot be forked.
"""

import os
import signal
import socket
import time
from collections.abc import Sequence

from runtime.options.facts import device_facts
from runtime.ranks.forks import SYS_CLONE, send_request

ANSWER_S = 1.0  # for a fork, which takes some milliseconds; the event loop waits for it
POLL_S = 0.001


class ForkedProcess:
    """A child that a fork server has forked, with the part of subprocess.Popen that ranks need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # as subprocess has it: -N after signal N

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end. -> exit code. Raises TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._wait(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended in {timeout} s")
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # something else has waited for it; subprocess calls this 0 as well
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class ForkServer:
    """At most one fork server at a time, which a rank makes when it is offered one. It may be killed at any
    moment."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._environment: dict[str, str] = {}  # that the fork server has
        self._process: ForkedProcess | None = None  # once it has written its process id

    @property
    def pids(self) -> list[int]:
        """The process id of the fork server, if there is one."""
        self._greet()
        return [] if self._process is None else [self._process.pid]

    def offer(self, environment: dict[str, str]) -> socket.socket | None:
        """The socket for a process that is about to be started in `environment`, with which it makes the fork
        server; the caller closes it here. None: another one was asked before. Raises OSError."""
        self._greet()
        if self._channel is not None:
            return None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = environment
        return theirs

    def fork(
        self, arguments: Sequence[str], environment: dict[str, str], fds: Sequence[int]
    ) -> ForkedProcess | None:
        """A fork that runs ranks/worker.py with these arguments, and has the descriptors `fds`. None: no fork
        server with this environment is there."""
        self._greet()
        if self._process is None or self._channel is None or environment != self._environment:
            return None
        self._channel.settimeout(ANSWER_S)
        try:
            send_request(self._channel, arguments, fds)
            answer = int(self._channel.recv(64) or -1)
        except (OSError, TimeoutError):
            answer = -1
        if answer < 0:  # it has ended, hangs, or cannot fork: a new process may be possible
            self.close()
            return None
        return ForkedProcess(answer)

    def close(self) -> None:
        """Ends the fork server. When it may still be made, which is when the process that was asked for it
        runs, it ends by itself."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        self._greet_on(channel)
        channel.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _greet(self) -> None:
        """Takes the process id of a fork server that has come up, and notes the end of one."""
        if self._channel is not None and not self._greet_on(self._channel):
            self.close()

    def _greet_on(self, channel: socket.socket) -> bool:
        """-> whether the other end of the socket is open"""
        channel.settimeout(0)
        try:
            text = channel.recv(64)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if text:
            self._process = ForkedProcess(int(text))
        return bool(text)


def open_fork_server(device: str, num_standby: int) -> ForkServer | None:
    """For ranks of a device whose imports can be forked, where standby ranks are wanted; nothing is started
    yet. None: every rank is started by exec."""
    forks = device_facts(device).forks_ranks and SYS_CLONE is not None
    return ForkServer() if forks and num_standby else None
