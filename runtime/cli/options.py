"""`runtime options`: the table of all options, for people (text), programs (--json, --schema) or at a glance
(--status)."""

import argparse
from collections import Counter
from collections.abc import Sequence

import msgspec

from runtime.options import docs
from runtime.options.help import help_text
from runtime.options.table import foreign_rows, rows


def run(argv: Sequence[str]) -> int:
    """Prints the table; raises OptionsError for a group that does not exist."""
    parser = argparse.ArgumentParser(
        prog="runtime options", allow_abbrev=False, description="List every option with its status."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json",
        action="store_true",
        help="a list of objects: flag, aliases, group, type, default, choices, status, note",
    )
    form.add_argument("--status", action="store_true", help="how many options have which status")
    form.add_argument("--schema", action="store_true", help="JSON Schema of the --config file")
    form.add_argument("--markdown", action="store_true", help="docs/options.md")
    parser.add_argument("group", nargs="*", help="groups to show (default: all)")
    arguments = parser.parse_args(argv)
    every = (*rows(), *foreign_rows())
    if arguments.group and (arguments.schema or arguments.markdown):
        parser.error("--schema and --markdown have all groups; leave the group out")
    groups = arguments.group or list(dict.fromkeys(row.group for row in every))
    text = help_text(groups)  # raises for a group that does not exist
    every = tuple(row for row in every if row.group in groups)
    if arguments.json:
        print(
            msgspec.json.format(
                msgspec.json.encode([docs.as_object(row) for row in every]), indent=1
            ).decode()
        )
    elif arguments.status:
        for status, count in Counter(row.status for row in every).most_common():
            print(f"{status:<13} {count:>4}")
    elif arguments.schema:
        print(msgspec.json.format(msgspec.json.encode(docs.schema()), indent=1).decode())
    elif arguments.markdown:
        print(docs.markdown(), end="")
    else:
        print(text)
    return 0
