"""Figures as JSON lines, appended to a file the moment that each is known: what a run has seen stays, however
it ends.

    {"at": "2026-01-31T12:00:00", "section": "attention", "name": "decode 1 x 32768", "figure": {...}}
"""

import json
import time
from pathlib import Path
from typing import Any


class Lines:
    """A file of lines; without a path, lines are printed alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def write(self, section: str, name: str, figure: Any) -> None:
        """Appends a line, and prints it."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        line = json.dumps({"at": at, "section": section, "name": name, "figure": figure})
        print(line, flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


class Figures(dict[str, Any]):
    """The figures of a section by name. Each becomes a line when it is set."""

    def __init__(self, section: str, lines: Lines) -> None:
        super().__init__()
        self._section, self._lines = section, lines

    def __setitem__(self, name: str, figure: Any) -> None:
        super().__setitem__(name, figure)
        self._lines.write(self._section, name, figure)
