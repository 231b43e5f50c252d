"""The lines of bench.gpu_run as a table of Markdown: the latest figure of each name, by section.

python -m bench.gpu_report [FILE]
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench.gpu_run import FILE
from bench.record import results_folder


def latest(text: str) -> dict[str, dict[str, Any]]:
    """section -> name -> figure; of lines with one name the last. A line that was cut off is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        found.setdefault(one["section"], {})[one["name"]] = one["figure"]
    return found


def cell(figure: Any) -> str:
    """A figure as text: `us 12.5, of_bandwidth 0.8`."""
    if not isinstance(figure, dict):
        return str(figure)
    return ", ".join(
        f"{name} ({cell(one)})" if isinstance(one, dict) else f"{name} {one}" for name, one in figure.items()
    )


def table(text: str) -> str:
    """The table of all lines."""
    rows = ["| section | | figure |", "| --- | --- | --- |"]
    for section, figures in latest(text).items():
        rows += [f"| {section} | {name} | {cell(figure)} |" for name, figure in figures.items()]
    return "\n".join(rows)


def main() -> None:
    """Prints the table."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else results_folder() / FILE
    print(table(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
