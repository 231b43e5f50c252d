"""A server of its own for `runtime chat`, for as long as the conversation lasts."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from runtime.admin.progress_line import LOG_S
from runtime.cli.chat_client import Chat, Reached
from runtime.errors import StartError
from runtime.log import CLEAR

START_TIMEOUT_S = 3600.0  # a large model takes its time to download and to load
STOP_TIMEOUT_S = 40.0
POLL_S = 0.1


@contextmanager
def own_server(serve_arguments: Sequence[str]) -> Iterator[str]:
    """The address of a server on a free port. It takes the port itself and logs it, so that no other process
    can take it in between. Raises StartError with its last words when it does not start."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        own = ["--port", "0", "--log-format", "json", "--log-level", "info"]
        command = [sys.executable, "-m", "runtime", "serve", *serve_arguments, *own]
        # A process group of its own: Ctrl-C ends an answer, not the server.
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        try:
            print("starting a server", file=sys.stderr)
            yield _await_ready(server, Path(f"/proc/self/fd/{log.fileno()}"))
        finally:
            server.terminate()
            try:
                server.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


class WaitingLine:
    """What a server does until it is ready: a line that is written over on a terminal, else one every few
    seconds."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`out` is standard error if it is left out."""
        self._out = out or sys.stderr
        self._clock = clock
        self._shown, self._shown_s = "", clock()

    def show(self, detail: str) -> None:
        """Shows what it does now, when it is time to."""
        if self._out.isatty():
            if detail != self._shown:
                print(f"{CLEAR}{detail}", end="", file=self._out, flush=True)
                self._shown = detail
        elif detail and self._clock() - self._shown_s >= LOG_S:
            self._shown_s = self._clock()
            print(detail, file=self._out, flush=True)

    def end(self) -> None:
        """Takes the line away."""
        if self._shown:
            print(CLEAR, end="", file=self._out, flush=True)
            self._shown = ""


def await_started(url: str, api_key: str | None) -> Reached:
    """What a server says when it is no longer starting."""
    deadline, line = time.monotonic() + START_TIMEOUT_S, WaitingLine()
    while (reached := Chat(url, api_key).health()).is_starting and time.monotonic() < deadline:
        line.show(reached.detail)
        time.sleep(POLL_S)
    line.end()
    return reached


def _await_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server that answers. What it is doing meanwhile is shown on a terminal."""
    deadline, line = time.monotonic() + START_TIMEOUT_S, WaitingLine()
    while time.monotonic() < deadline:
        url = logged_url(log.read_text(encoding="utf-8", errors="replace"))
        reached = Reached() if url is None else Chat(url).health()
        line.show(reached.detail)
        if url is not None and reached.is_ready:
            line.end()
            return url
        try:
            server.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            continue
        line.end()
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise StartError(
            f"the server did not start: {words[-1] if words else f'exit code {server.returncode}'}"
        )
    raise StartError(f"the server did not answer within {START_TIMEOUT_S:.0f} s")


def logged_url(text: str) -> str | None:
    """The `url` of the server's log line that says where it listens; None: there is none yet."""
    for line in text.splitlines():
        if line.startswith("{") and line.endswith("}") and "url" in (event := json.loads(line)):
            return str(event["url"])
    return None
