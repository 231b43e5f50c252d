"""Which splits of a model work, found by running them: the table of docs/parallelism.md.

    python -m tests.splits.matrix [SPLIT ...] [--columns NAME ...]

Each of SPLITS is a row, and each of CHECKS a column. A cell is "yes" after a run that passed; "refused", with
the sentence in which a start refuses it; or a dash: not run, or a run that failed, and then the command ends
with exit code 1. Rows and columns that are not named stay as they are, unless none is named: then all are
written anew but those of the simulated NPU, which `./dev test-splits-ascend` writes.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.actors import child_environment
from tests.launcher import Launchers
from tests.models.matrix_checks import Refused
from tests.models.matrix_table import NOT_RUN, Page, Row
from tests.splits.checks import CHECKS, MODULES, Bench
from tests.splits.splits import SPLITS

DOCS = Path(__file__).parents[2] / "docs" / "parallelism.md"
PAGE = Page(DOCS, "./dev test-splits", "split")
IS_NPU = "SIM_CANN_LIBRARIES" in os.environ


def run_cell(bench: Bench, split: str, column: str) -> tuple[str, str]:
    """Runs a check of a split. -> the cell, and a traceback if it failed."""
    try:
        return ("yes" if CHECKS[column](bench, SPLITS[split]) else NOT_RUN), ""
    except Refused as refused:
        return str(refused), ""
    except Exception:
        return NOT_RUN, f"{split}, {column}: {traceback.format_exc()}"


def run(splits: list[str], columns: list[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Cells by split and column, and what failed; a line for each split that is done."""
    found: dict[str, dict[str, str]] = {}
    problems = []
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            for i, split in enumerate(splits, 1):
                begin = time.monotonic()
                found[split] = {}
                for column in columns:
                    found[split][column], problem = run_cell(bench, split, column)
                    problems += [problem] if problem else []
                    print(problem, end="", file=sys.stderr, flush=True)
                shown = ", ".join(name for name, cell in found[split].items() if cell == "yes")
                print(
                    f"{i:3} of {len(splits)}  {split}: {shown} ({time.monotonic() - begin:.0f} s)", flush=True
                )
        finally:
            bench.close()
    return found, problems


def merged(found: dict[str, dict[str, str]], kept: dict[str, Row]) -> list[Row]:
    """The rows of the page with these cells in place of theirs."""
    rows = []
    for split in SPLITS:
        old = kept[split].cells if split in kept else {}
        cells = {column: old.get(column, NOT_RUN) for column in CHECKS}
        rows.append(Row(split, cells | found.get(split, {})))
    return rows


def main() -> int:
    """Runs what is named, and writes the table."""
    parser = argparse.ArgumentParser(
        prog="./dev test-splits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("splits", nargs="*", metavar="SPLIT", help='rows, as "--tp-size 2"')
    parser.add_argument("--columns", nargs="+", choices=CHECKS, metavar="NAME", help=", ".join(CHECKS))
    words = sys.argv[1:]
    args, more = parser.parse_known_args([word for word in words if word not in SPLITS])
    splits = [word for word in words if word in SPLITS] or list(SPLITS)
    if unknown := [*args.splits, *more]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(map(repr, SPLITS))}")
    columns = args.columns or [name for name in CHECKS if (name == "npu") == IS_NPU]
    begin = time.monotonic()
    launchers = Launchers(MODULES)
    child_environment.start_module, start_afresh = launchers.start_module, child_environment.start_module
    try:
        found, problems = run(splits, columns)
    finally:
        child_environment.start_module = start_afresh
        launchers.close()
    PAGE.write_rows(merged(found, PAGE.read_rows()))
    seconds = time.monotonic() - begin
    print(f"{len(splits)} splits in {seconds:.0f} s, {len(problems)} failures; see {DOCS.name}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
