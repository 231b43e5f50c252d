"""The process of the first rank, which `runtime serve` starts before it has read its options: importing torch
takes as long as everything else that a start does, and needs nothing of them.

    serve ──open_early_process──► imports torch ──────────────────────────► takes its arguments, and is rank 0
            options, plan, rings ──EarlyProcess.take──(arguments, descriptors)──►

It is started as options usually are: one rank on the cpu of a machine without accelerators. Where they are
others, it is ended, and ranks are started as they are later. Imports nothing that takes long.
"""

import os
import resource
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from glob import glob

from runtime.actors import child_environment
from runtime.devices.cores import threads_of_rank, usable_cores

DEVICE = "cpu"
ACCELERATORS = ("/dev/davinci[0-9]*", "/dev/nvidia[0-9]*")  # where there is one, DEVICE is another
KILL_S = 10.0  # that a process is waited for after SIGKILL


class EarlyProcess:
    """A process that imports what ranks of a device need, and waits for the arguments of a rank."""

    def __init__(self, device: str, environment: dict[str, str]) -> None:
        """Starts it. Raises OSError."""
        self.device = device
        self._environment = environment
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            end = theirs.fileno()
            arguments = ["--early", str(end), "--import", device, "--parent", str(os.getpid())]
            self._process = child_environment.start_module(
                "runtime.ranks.worker", arguments, environment, [end]
            )
        self._is_taken = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def take(
        self, arguments: Sequence[str], environment: dict[str, str], fds: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """The process, which becomes what `python -m runtime.ranks.worker` with these arguments would be, and
        has the descriptors `fds`. None: it has another environment or was taken before, or has ended."""
        from runtime.ranks.forks import send_request

        if self._is_taken or environment != self._environment or self._process.poll() is not None:
            return None
        resource.prlimit(
            self._process.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        try:
            send_request(self._channel, arguments, fds)
        except OSError:  # it has ended at this moment
            return None
        self._is_taken = True
        return self._process

    def close(self) -> None:
        """Ends it, unless it was taken."""
        self._channel.close()
        if not self._is_taken:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # held by a device driver: it is left to the kernel
                self._process.wait(KILL_S)


def open_early_process(words: Sequence[str]) -> EarlyProcess | None:
    """Starts the process of the first rank of a server with this command line. None: its ranks are of another
    device, or the system refuses it, which is reported when they are started."""
    if any(word.split("=")[0] in ("--device", "--nnodes") for word in words) or any(map(glob, ACCELERATORS)):
        return None
    try:
        return EarlyProcess(DEVICE, child_environment.environment(threads_of_rank(usable_cores())))
    except OSError:
        return None
