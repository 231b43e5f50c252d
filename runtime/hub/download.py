"""Downloads by a child process (child.py): the small files of a model before the options are resolved, its
weights while the server is up already and says in /health how far they are."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.text import TextReceiveStream

from runtime import log
from runtime.errors import ModelError
from runtime.hub.child import REPORT_S, Job, Part, Report
from runtime.hub.seed import KEY_VARIABLE
from runtime.hub.source import HubModel

REPORTS_OF_LINE = int(5 / REPORT_S)  # of a download that blocks: reports until the next log line


def fetch_config(model: HubModel, key: str | None = None) -> Path:
    """Downloads the small files of a model and returns its folder, to which the weights come later. Blocks.
    `key`: for a server that the files come from. Raises ModelError."""
    done = subprocess.run(
        _command(model, "config"),
        env=environment_of_child(key),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return _folder(model, done.stdout.decode("utf-8", "replace").splitlines()[-1:])


def fetch_gguf(model: HubModel) -> Path:
    """Downloads a GGUF file, all parts of it, and returns the path of the first. Blocks, with a log line
    every five seconds. Raises ModelError."""
    last, count = "", 0
    with subprocess.Popen(
        _command(model, "gguf"),
        env=environment_of_child(),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            last, count = line, count + 1
            report = _report(line)
            if report is not None and report.total and count % REPORTS_OF_LINE == 0:
                done, total = (f"{size / 1e6:.0f} MB" for size in (report.done, report.total))
                log.get("start").info("downloading", file=model.gguf, done=done, of=total)
    return _folder(model, [last])


async def fetch_weights(
    model: HubModel, on_progress: Callable[[Report], None], *, checks: bool = False, key: str | None = None
) -> Path:
    """Downloads the weights of a model and returns its folder; cancelling it ends the download, whose bytes
    stay. `checks`: see Job; `key`: see fetch_config. Raises ModelError."""
    last = ""
    async with _child(_command(model, "weights", checks=checks), key) as lines:
        async for line in lines:
            last = line
            report = _report(line)
            if report is not None and report.total:
                on_progress(report)
    return _folder(model, [last])


def _command(model: HubModel, part: Part, *, checks: bool = False) -> list[str]:
    job = msgspec.json.encode(Job(model, part, checks)).decode()
    return [sys.executable, "-P", "-m", "runtime.hub.child", job]


def environment_of_child(key: str | None = None) -> dict[str, str]:
    """The child's environment: this package is found where it is here, and nothing in the working folder is
    imported (-P). `key`: see fetch_config."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    paths = {"PYTHONPATH": f"{known}{os.pathsep}{root}" if known else root}
    return {**os.environ, **paths, **({} if key is None else {KEY_VARIABLE: key})}


@asynccontextmanager
async def _child(command: list[str], key: str | None) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a child's output; the child is killed when the block is left before its end."""
    process: Process = await anyio.open_process(
        command, env=environment_of_child(key), stdin=subprocess.DEVNULL, stderr=None
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
