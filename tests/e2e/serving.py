"""`runtime serve` as a process, and how tests talk to it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

WAIT_S = 60.0


class Server:
    """A running server and how to talk to it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=WAIT_S)

    def load(self) -> dict[str, Any]:
        return self.get("/v1/loads").json()["loads"][0]

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    def rank_pids(self, kind: str = "rank") -> list[int]:
        """Process ids of the ranks, or of standby ranks (`kind` standby)."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(p) for p in children if Path(f"/proc/{p}/comm").read_text().startswith(f"{kind}-")]


@contextmanager
def serve(*options: str) -> Iterator[Server]:
    command = [
        sys.executable,
        "-m",
        "runtime",
        "serve",
        "--port",
        "0",
        "--num-threads",
        "1",
        "--log-format",
        "json",
        *(() if "--standby-ranks" in options else ("--standby-ranks", "0")),
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening" in line:
                server = Server(process, json.loads(line)["url"])
                break
        else:
            raise AssertionError("the server ended before it listened")
        with server.client:
            server.wait(lambda: server.get("/health").status_code == 200)
            yield server
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stderr.close()  # type: ignore[union-attr]
