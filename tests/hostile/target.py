"""A server to attack: a process with keys, stores and adapters, its log in a file, and what it holds."""

import http.client
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hostile.case import ADMIN_KEY, USER_KEY
from tests.hostile.jumping_clock import JumpingClock
from tests.hostile.neighbours import GOOD_KEY

START_S = 120.0
OPTIONS = (
    *("--context-length", "512", "--max-body-bytes", str(2**20), "--file-storage-bytes", str(2**23)),
    *("--api-key", GOOD_KEY, USER_KEY, "--admin-api-key", ADMIN_KEY, "--num-threads", "1"),
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all", "--enable-memory-saver"),
    *("--grammar-timeout", "3"),
)
NULL = ("--device", "null", "--served-model-name", "pocket", "--null-first-token", "71")  # it says letters
MODEL = ("--device", "cpu", "--dtype", "float32")


class Target:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, *, has_model: bool) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.has_model = has_model

    def get(self, path: str) -> tuple[int, bytes]:
        """One GET without a key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by name with labels, without the prefix of this project."""
        text = self.get("/metrics")[1].decode()
        pairs = re.findall(r"^runtime_(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in pairs}

    def bugs(self) -> list[str]:
        """Unexpected errors that the log holds, each with its stack."""
        return ["Traceback" + part for part in self.log.read_text(errors="replace").split("Traceback")[1:]]

    def pids(self) -> list[int]:
        """The server's process and its descendants."""
        found, pending = [], [self.process.pid]
        while pending:
            found.append(pid := pending.pop())
            try:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pending += map(int, (task / "children").read_text().split())
            except FileNotFoundError:
                pass  # it ended meanwhile
        return found

    def rank_pids(self) -> list[int]:
        """The processes that are ranks."""
        found = []
        for pid in self.pids()[1:]:
            try:
                if Path(f"/proc/{pid}/comm").read_text().startswith("rank-"):
                    found.append(pid)
            except FileNotFoundError:
                pass  # it ended meanwhile
        return found

    def descriptors(self) -> int:
        """Open file descriptors of the server's process."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextmanager
def target(folder: Path, *options: str, clock: JumpingClock | None = None) -> Iterator[Target]:
    """A server while the context is open; its log and its files are in `folder`. `clock` is its wall
    clock, if not the machine's."""
    log = folder / "log.jsonl"
    program = ["runtime"] if clock is None else ["tests.hostile.jumping_clock", str(clock.path)]
    command = [sys.executable, "-m", *program, "serve", "--port", "0", "--log-format", "json"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--file-storage-path", str(folder / "files"), *options], stderr=stderr
        )
    try:
        deadline = time.monotonic() + START_S
        while (url := re.search(r'"url": ?"http://[^:]*:(\d+)', log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.02)
        running = Target(process, int(url[1]), log, has_model="null" not in options)
        while running.get("/health")[0] != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.02)
        yield running
    finally:
        process.terminate()
        process.wait(START_S)
