"""Starts processes of the package by forking one that has imported torch: the import takes longer than what
most tests do with a rank.

`python -m tests.launcher FD MODULE ...` imports the modules, then forks for each request that it reads from
the socket. The fork has the caller as its parent, as a process that the caller had started would: signals,
exit codes and the death of the parent are the same. A launcher has one environment for its life.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runtime.actors import child_environment
from runtime.actors.fork_server import ForkedProcess
from runtime.ranks.forks import fork_as_sibling, give_numbers

MAX_REQUEST_BYTES = 1 << 17
MAX_ENVIRONMENTS = 8


class Launcher:
    """A process that has imported `modules` in `environment`, and forks on request."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.launcher", str(theirs.fileno()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int]) -> ForkedProcess:
        """Runs `python -P -m module arguments` with these descriptors, and stderr as it is here and now."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "fds": list(fds),
            "folder": str(Path.cwd()),
        }
        body = json.dumps(request).encode()
        assert len(body) < MAX_REQUEST_BYTES
        socket.send_fds(self._socket, [body], [2, *fds])
        answer = self._socket.recv(64)
        assert answer, "the launcher has ended; its last words are on stderr"
        return ForkedProcess(int(answer))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Launchers:
    """One launcher for each environment that is seen twice; the first process of each is started afresh."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._start_afresh = child_environment.start_module
        self._by_environment: dict[tuple[tuple[str, str], ...], Launcher | None] = {}

    def start_module(
        self, module: str, arguments: Sequence[str], environment: dict[str, str], fds: Sequence[int]
    ) -> "ForkedProcess | subprocess.Popen[bytes]":
        """Stands in for child_environment.start_module."""
        own = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
        key = tuple(sorted(own.items()))
        is_known, launcher = key in self._by_environment, self._by_environment.get(key)
        if launcher is None and is_known and len(self._by_environment) <= MAX_ENVIRONMENTS:
            launcher = Launcher(own, self._modules)
        self._by_environment[key] = launcher
        if launcher is None:
            return self._start_afresh(module, arguments, environment, fds)
        return launcher.start(module, arguments, fds)

    def close(self) -> None:
        for launcher in self._by_environment.values():
            if launcher is not None:
                launcher.close()


def run(request: dict, received: Sequence[int]) -> NoReturn:
    """Becomes what was asked for, in a fork."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(request["folder"])
        targets = [2, *request["fds"]]
        give_numbers(received, targets)
        os.dup2(2, 1)
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        body, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 250)
        if not body:
            return
        pid = fork_as_sibling()
        if pid == 0:
            channel.close()
            run(json.loads(body), fds)
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())


if __name__ == "__main__":
    main()
