"""Tables of the docs that say what was run: written by a command between two marker lines, and read back."""

import re
from pathlib import Path
from typing import NamedTuple

NOT_RUN = "–"
REFUSED = re.compile(r"refused \[(\d+)\]")
NOTE = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


class Row(NamedTuple):
    """What became of the checks of one thing, by their names: "yes", NOT_RUN, or the reason of a refusal."""

    name: str
    cells: dict[str, str]


def render(rows: list[Row], columns: list[str], title: str) -> str:
    """The table, and below it the reasons of refusals, each once. `title`: of the first column."""
    reasons: list[str] = []

    def shown(cell: str) -> str:
        if cell in ("yes", NOT_RUN):
            return cell
        if cell not in reasons:
            reasons.append(cell)
        return f"refused [{reasons.index(cell) + 1}]"

    lines = [f"| {title} | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for row in rows:
        cells = [shown(row.cells.get(column, NOT_RUN)) for column in columns]
        lines.append(f"| `{row.name}` | {' | '.join(cells)} |")
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes]).strip() + "\n"


def parse(text: str) -> tuple[dict[str, Row], list[str]]:
    """Rows by name, and the columns, of what `render` wrote."""
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
    return {row.name: row for row in rows}, columns


class Page(NamedTuple):
    """A page of the docs with a table that a command writes between two marker lines."""

    path: Path
    command: str
    title: str  # of the first column

    @property
    def begin(self) -> str:
        """The line before the table."""
        return f"<!-- written by {self.command}: begin -->"

    @property
    def end(self) -> str:
        """The line behind it."""
        return f"<!-- written by {self.command}: end -->"

    def between(self) -> tuple[str, str, str]:
        """What is before, between and behind the marker lines. Raises ValueError where one is missing."""
        before, found, rest = self.path.read_text().partition(self.begin + "\n")
        inner, found_end, behind = rest.partition(self.end + "\n")
        if not found or not found_end:
            raise ValueError(f"the lines {self.begin} and {self.end} are missing")
        return before, inner, behind

    def read_rows(self) -> dict[str, Row]:
        """The rows of the page by name."""
        return parse(self.between()[1])[0]

    def write_rows(self, rows: list[Row]) -> None:
        """Puts the rows in place of the page's."""
        before, _, behind = self.between()
        table = render(rows, list(rows[0].cells), self.title)
        self.path.write_text(f"{before}{self.begin}\n{table}{self.end}\n{behind}")
