"""Which of transformers' classes without code of ours are served over paged attention, found by trying each:
the last table of docs/models.md.

    python -m tests.models.transformers_matrix [CLASS ...]

Each class of transformers' table of models that generate is a row, made tiny from its config class
(tiny_configs.py) and started with --model-impl auto. "served" is "yes", or "refused" with the sentence in
which a start refuses it; the other columns are checks of the matrix of families, greedy tokens against
transformers. Without names all rows are run and written anew, with names these rows.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers

from runtime.errors import StartError
from tests.devices.drive import start
from tests.models import matrix_checks
from tests.models.compare import expected_of
from tests.models.matrix import DOCS, run
from tests.models.matrix_checks import NUM_TOKENS, PROMPTS, Made, Refused
from tests.models.matrix_table import NOT_RUN, Page, Row
from tests.models.tiny_configs import other_classes, write_checkpoint, write_config

SERVED = "served"
CHECKS = {
    "company": matrix_checks.company,
    "chunks": matrix_checks.chunks,
    "prefix": matrix_checks.prefix,
    "preempted": matrix_checks.preempted,
    "host tier": matrix_checks.host_tier,
    "graphs": matrix_checks.graphs,
}
TITLE = f"class of transformers {transformers.__version__}"
PAGE = Page(DOCS, "./dev test-transformers", TITLE)


def refusal(name: str, folder: Path) -> str | None:
    """The sentence in which a start refuses a class, by config.json alone; None: it starts."""
    write_config(other_classes()[name], folder)
    try:
        start(folder, load_format="dummy")[0].close()
    except StartError as error:
        return " ".join(str(error).replace(name, "this class").split())
    return None


def run_row(name: str, checks: tuple[str, ...] = tuple(CHECKS)) -> tuple[Row, str]:
    """Tries a class. -> its cells, and tracebacks of what failed."""
    cells, problems = dict.fromkeys((SERVED, *CHECKS), NOT_RUN), []
    with TemporaryDirectory() as work:
        folder = Path(work) / "plain"
        folder.mkdir()
        try:
            reason = refusal(name, folder)
            if reason is None:
                write_checkpoint(other_classes()[name], folder)
                expected = expected_of(folder, PROMPTS, NUM_TOKENS)
        except Exception:
            return Row(name, cells), f"{name}: {traceback.format_exc()}"
        cells[SERVED] = reason or "yes"
        if reason is not None:
            return Row(name, cells), ""
        made = Made(name, folder, folder, expected, Path(work))
        for check in checks:
            try:
                cells[check] = "yes" if CHECKS[check](made) else NOT_RUN
            except Refused as refused:
                cells[check] = str(refused)
            except Exception:
                problems.append(f"{name}, {check}: {traceback.format_exc()}")
    return Row(name, cells), "\n".join(problems)


def main() -> int:
    """Tries the classes that are named, all without names, and writes the table."""
    parser = argparse.ArgumentParser(
        prog="./dev test-transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="as LlamaForCausalLM")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    known = other_classes()
    if unknown := set(args.classes) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if args.classes and TITLE not in PAGE.between()[1]:
        parser.error("the table is of another version of transformers; run all classes")
    begin = time.monotonic()
    rows, problems = run(run_row, args.classes or list(known), args.processes)
    kept = {name: row for name, row in PAGE.read_rows().items() if args.classes and name in known}
    kept |= {row.name: row for row in rows.values()}
    PAGE.write_rows([kept[name] for name in sorted(kept, key=str.lower)])
    seconds = time.monotonic() - begin
    print(f"{len(rows)} rows in {seconds:.0f} s, {len(problems)} with failures; see {DOCS.name}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
