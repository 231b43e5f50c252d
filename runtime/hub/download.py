"""Downloads by a child process (child.py): the small files of a model before the options are resolved, its
weights while the server is up already and says in /health how far they are."""

import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.text import TextReceiveStream
from msgspec import Struct

from runtime import log
from runtime.errors import ModelError
from runtime.hub.child import Job, Part, Report
from runtime.hub.source import HubModel

LOG_S = 5.0  # between log lines of a download
REDRAW_S = 0.5  # on a terminal
MIN_RATE_S = 2.0  # a rate is said of at least so long a time


class Progress(Struct, frozen=True):
    """How far a download is."""

    done: int  # bytes
    total: int  # bytes
    rate: float  # bytes per second since it began
    left_s: float  # seconds left at that rate; infinite: unknown

    def __str__(self) -> str:
        """For people: `1.2 of 15.0 GB, 42 MB/s, 5 min left`."""
        text = f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        if math.isinf(self.left_s):
            return text
        left = f"{self.left_s:.0f} s" if self.left_s < 100 else f"{self.left_s / 60:.0f} min"
        return f"{text}, {self.rate / 1e6:.0f} MB/s, {left} left"


class ProgressLine:
    """Shows how far a download is: one line that is written over on a terminal, else a log line every few
    seconds."""

    def __init__(self) -> None:
        self.text = ""  # how far it is, while it runs
        self._last_s = -math.inf
        self._is_terminal = sys.stderr.isatty()

    async def fetch(self, model: HubModel, *, checks: bool = False) -> None:
        """Downloads the weights of a model. `checks`: see Job. Raises ModelError."""
        await fetch_weights(model, lambda progress: self._show(model.repo, progress), checks=checks)
        self.text = ""

    def _show(self, repo: str, progress: Progress) -> None:
        now, is_done = time.monotonic(), progress.done >= progress.total
        self.text = f"downloading {repo}: {progress}"
        if not is_done and now - self._last_s < (REDRAW_S if self._is_terminal else LOG_S):
            return
        self._last_s = now
        if self._is_terminal:
            print(f"\r\x1b[K{self.text}", end="\n" if is_done else "", file=sys.stderr, flush=True)
        else:
            log.get("hub").info("downloading", model=repo, progress=str(progress))


def fetch_config(model: HubModel) -> Path:
    """Downloads the small files of a model and returns its folder, to which the weights come later. Blocks.
    Raises ModelError."""
    done = subprocess.run(
        _command(model, "config"),
        env=_environment(),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return _folder(model, done.stdout.decode("utf-8", "replace").splitlines()[-1:])


async def fetch_weights(
    model: HubModel, on_progress: Callable[[Progress], None], *, checks: bool = False
) -> Path:
    """Downloads the weights of a model and returns its folder; cancelling it ends the download, whose bytes
    stay. `checks`: see Job. Raises ModelError."""
    begin, last = time.monotonic(), ""
    async with _child(_command(model, "weights", checks=checks)) as lines:
        async for line in lines:
            last = line
            report = _report(line)
            if report is not None and report.total:
                on_progress(_progress(report, time.monotonic() - begin))
    return _folder(model, [last])


def _progress(report: Report, seconds: float) -> Progress:
    rate = report.done / seconds if seconds >= MIN_RATE_S else 0.0
    return Progress(
        report.done, report.total, rate, (report.total - report.done) / rate if rate else math.inf
    )


def _command(model: HubModel, part: Part, *, checks: bool = False) -> list[str]:
    job = msgspec.json.encode(Job(model, part, checks)).decode()
    return [sys.executable, "-P", "-m", "runtime.hub.child", job]


def _environment() -> dict[str, str]:
    """The child's environment: this package is found where it is here, and nothing in the working folder is
    imported (-P)."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{known}{os.pathsep}{root}" if known else root}


@asynccontextmanager
async def _child(command: list[str]) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a child's output; the child is killed when the block is left before its end."""
    process: Process = await anyio.open_process(
        command, env=_environment(), stdin=subprocess.DEVNULL, stderr=None
    )
    try:
        assert process.stdout is not None
        yield _lines(process.stdout)
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()


async def _lines(stream: ByteReceiveStream) -> AsyncIterator[str]:
    rest = ""
    async for text in TextReceiveStream(stream, errors="replace"):
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            yield line


def _report(line: str) -> Report | None:
    try:
        return msgspec.json.decode(line, type=Report)
    except msgspec.MsgspecError:
        return None


def _folder(model: HubModel, last: list[str]) -> Path:
    """What the last line of the child says. Raises ModelError."""
    report = _report(last[0]) if last else None
    if report is not None and report.folder:
        return Path(report.folder)
    raise ModelError(
        report.error
        if report is not None and report.error
        else f"the download of {model.repo} ended without a word; what it wrote to standard error says why"
    )
