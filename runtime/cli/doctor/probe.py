"""What a look at the machine finds, and ways to look: files, tools, packages."""

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from msgspec import Struct

Verdict = Literal["ok", "note", "problem"]
TOOL_TIMEOUT_S = 10.0


class Finding(Struct, frozen=True):
    """One thing that was looked at. `advice` says what to do about it."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def read(path: Path) -> str:
    """A file's text; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def ask(*command: str) -> str:
    """What a tool prints; nothing when it is missing, fails or does not answer in time."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TOOL_TIMEOUT_S
        ).stdout.strip()
    except subprocess.TimeoutExpired:
        return ""


def package(name: str) -> str | None:
    """The version that is installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
