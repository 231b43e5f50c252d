"""The table of docs/models.md that matrix.py writes between two marker lines, and reads back."""

import re
from pathlib import Path
from typing import NamedTuple

BEGIN = "<!-- written by ./dev test-models: begin -->"
END = "<!-- written by ./dev test-models: end -->"
NOT_RUN = "–"
REFUSED = re.compile(r"refused \[(\d+)\]")
NOTE = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


class Row(NamedTuple):
    """What became of an architecture's checks, by name: "yes", NOT_RUN, or the reason of a refusal."""

    architecture: str
    cells: dict[str, str]


def render(rows: list[Row], columns: list[str]) -> str:
    """The table, and below it the reasons of refusals, each once."""
    reasons: list[str] = []

    def shown(cell: str) -> str:
        if cell in ("yes", NOT_RUN):
            return cell
        if cell not in reasons:
            reasons.append(cell)
        return f"refused [{reasons.index(cell) + 1}]"

    lines = [f"| architecture | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for row in rows:
        cells = [shown(row.cells.get(column, NOT_RUN)) for column in columns]
        lines.append(f"| `{row.architecture}` | {' | '.join(cells)} |")
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes]).strip() + "\n"


def parse(text: str) -> tuple[dict[str, Row], list[str]]:
    """Rows by architecture, and the columns, of what `render` wrote."""
    reasons = dict(NOTE.findall(text))
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    if not table:
        return {}, []
    columns = table[0][1:]

    def meant(cell: str) -> str:
        found = REFUSED.fullmatch(cell)
        return cell if found is None else reasons[found.group(1)]

    rows = [
        Row(name.strip("`"), dict(zip(columns, map(meant, cells), strict=True))) for name, *cells in table[2:]
    ]
    return {row.architecture: row for row in rows}, columns


def between(docs: str) -> tuple[str, str, str]:
    """What is before, between and behind the marker lines. Raises ValueError where one is missing."""
    before, found, rest = docs.partition(BEGIN + "\n")
    inner, found_end, behind = rest.partition(END + "\n")
    if not found or not found_end:
        raise ValueError(f"the lines {BEGIN} and {END} are missing")
    return before, inner, behind


def read_rows(path: Path) -> dict[str, Row]:
    """The rows of a page."""
    return parse(between(path.read_text())[1])[0]


def write_rows(path: Path, rows: dict[str, Row]) -> None:
    """Puts the rows in place of the page's, in the order of their names."""
    before, _, behind = between(path.read_text())
    columns = list(next(iter(rows.values())).cells)
    ordered = [rows[name] for name in sorted(rows, key=str.lower)]
    path.write_text(f"{before}{BEGIN}\n{render(ordered, columns)}{END}\n{behind}")
