"""Starts `runtime serve` for a bench and stops it again."""

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket


def environment() -> dict[str, str]:
    """A server's environment: this process's, in which Python keeps the compiled form of modules, as
    installing a package does."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def free_port() -> int:
    """A free TCP port on the loopback interface."""
    with socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def get(port: int, path: str) -> tuple[int, bytes]:
    """One GET on a new connection; raises OSError while no server listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def server(*options: str, command: str = "serve") -> Iterator[tuple[int, int, float]]:
    """Serves, or routes with the command `route`, while the context is open: its port, process id and the
    seconds until it was ready."""
    port = free_port()
    begin = time.perf_counter()
    words = [sys.executable, "-m", "runtime", command, "--port", str(port), *options]
    process = subprocess.Popen(words, env=environment())
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            try:
                if get(port, "/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.02)
        yield port, process.pid, time.perf_counter() - begin
    finally:
        process.terminate()
        process.wait(20)
