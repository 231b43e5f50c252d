"""A server of its own for `runtime chat`, for as long as the conversation lasts."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.cli.chat_client import Chat
from runtime.errors import StartError

START_TIMEOUT_S = 3600.0  # a large model takes its time to download and to load
STOP_TIMEOUT_S = 40.0


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
            print("starting a server ...", file=sys.stderr)
            yield _await_ready(server, Path(f"/proc/self/fd/{log.fileno()}"))
        finally:
            server.terminate()
            try:
                server.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server that answers. What it is doing meanwhile is shown on a terminal."""
    deadline, shown = time.monotonic() + START_TIMEOUT_S, ""
    while time.monotonic() < deadline:
        url = logged_url(log.read_text(encoding="utf-8", errors="replace"))
        is_ready, detail = (False, "") if url is None else Chat(url).health()
        if detail != shown and sys.stderr.isatty():
            shown = detail
            print(f"\r\x1b[K{detail}", end="", file=sys.stderr, flush=True)
        if url is not None and is_ready:
            return url
        try:
            server.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
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
