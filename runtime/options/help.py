"""The table as text for people: `--help`, and the sections of docs/options.md."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from runtime.errors import OptionsError
from runtime.options.table import Row, foreign_rows, rows

WIDTH = 120


def help_text(groups: Sequence[str] = ()) -> str:
    """The options that work, if only in part, by group; or all options of the named groups with their status.

    Raises OptionsError for a group that does not exist.
    """
    every = (*rows(), *foreign_rows())
    known = {row.group: row.title for row in every}
    unknown = [name for name in groups if name not in known]
    if unknown:
        raise OptionsError([_no_group(name, list(known)) for name in unknown])
    shown = [row for row in every if (row.group in groups if groups else row.acts)]
    parts = [
        f"{title} ({group})\n" + "\n".join(_help_lines(row) for row in members)
        for (group, title), members in groupby(shown, key=lambda row: (row.group, row.title))
    ]
    others = len(every) - len(shown)
    if not groups:
        parts.append(
            _wrap(
                f"{others} further options of the reference systems are known; `runtime options` lists "
                "them with their status, "
                f"`runtime serve --help GROUP` those of a group: {', '.join(known)}.",
                indent="",
            )
        )
    return "\n\n".join(parts)


def _no_group(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"there is no group {name}; " + (
        f"did you mean {near[0]}?" if near else f"groups are {', '.join(known)}"
    )


def _help_lines(row: Row) -> str:
    now = [choice for choice in row.choices or () if choice not in row.later]
    metavar = "|".join(now) or re.sub(r" [<>]=?[\d.-]+", "", row.type)
    is_long = len(metavar) > WIDTH // 2
    flags = ", ".join((row.flag, *row.aliases)) + (
        "" if row.takes == "switch" else " WORD" if is_long else f" {metavar}"
    )
    parts = (
        "" if row.acts else f"[{row.status}] ",
        row.help,
        f" One of {', '.join(now)}." if is_long else "",
        "" if row.takes == "switch" else f" (default: {shown_default(row.default)})",
        f" ({row.note})" if row.note and not row.acts else "",
        f" (Missing: {row.missing}.)" if row.missing else "",
    )
    return f"  {flags}\n" + _wrap("".join(parts), indent="      ")


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def shown_default(default: object) -> str:
    """A default as help and docs show it."""
    match default:
        case None:
            return "none"
        case bool():
            return "on" if default else "off"
        case list() | tuple():
            return " ".join(map(str, default)) or "none"
        case "":
            return "none"
        case _:
            return str(default)


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells may hold anything but line ends."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, lines)])
