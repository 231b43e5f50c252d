"""What works for each model family, found by running it: the table of docs/models.md.

    python -m tests.models.matrix [FAMILY ...]

Each family of make.py and layouts.py is a row, and each of CHECKS a column. Tokens are those of transformers
on the same tiny random weights: float32, greedy, token for token. A cell is "yes" after a run that passed;
"refused", with the sentence in which a start refuses it; or a dash: not run, or a run that failed, and then
the command ends with exit code 1. Without names all rows are run and written anew, with names these rows.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from runtime.models.config.registry import FAMILIES
from runtime.models.config.tasks import family_of
from tests.models import make
from tests.models.layouts import ELSEWHERE, LAYOUTS
from tests.models.matrix_checks import CHECKS, Made, Refused, close_ranks
from tests.models.matrix_table import NOT_RUN, Page, Row

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
PAGE = Page(DOCS, "./dev test-models", "architecture")


def architecture_of(family: str) -> str:
    """The architecture in config.json of a row's checkpoint."""
    if family in LAYOUTS:
        return LAYOUTS[family].architecture
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING[make.FAMILIES[family][0]].__name__
    return name


def all_rows() -> dict[str, str]:
    """Architectures by the names of the checkpoints that are made of them."""
    return {family: architecture_of(family) for family in (*make.FAMILIES, *LAYOUTS)}


def families_without_rows() -> list[str]:
    """Registered families of which no checkpoint is made. Names that share a row of the registry are one, and
    those of ELSEWHERE are left out."""
    made = [FAMILIES.get(family_of(architecture)) for architecture in all_rows().values()]
    return [
        name
        for name, row in FAMILIES.items()
        if name not in ELSEWHERE and not any(row is one for one in made)
    ]


def run_row(family: str, checks: tuple[str, ...] = tuple(CHECKS)) -> tuple[Row, str]:
    """Runs the checks of a family. -> its cells, and tracebacks of what failed."""
    cells, problems = dict.fromkeys(CHECKS, NOT_RUN), []
    with TemporaryDirectory() as folder:
        try:
            made = Made.of(family, Path(folder))
        except Exception:
            return Row(architecture_of(family), cells), f"{family}: {traceback.format_exc()}"
        for name in checks:
            try:
                cells[name] = "yes" if CHECKS[name](made) else NOT_RUN
            except Refused as refused:
                cells[name] = str(refused)
            except Exception:
                problems.append(f"{family}, {name}: {traceback.format_exc()}")
    return Row(architecture_of(family), cells), "\n".join(problems)


def start_worker() -> None:
    """One of the processes that run rows: a thread each, and ranks named by their devices."""
    import torch

    torch.set_num_threads(1)


def run(
    run_row: Callable[[str], tuple[Row, str]], names: list[str], num_processes: int
) -> tuple[dict[str, Row], list[str]]:
    """Rows by name, and what failed; a line for each row that is done."""
    rows, problems = {}, []
    with ProcessPoolExecutor(num_processes, get_context("spawn"), start_worker) as pool:
        waiting = {pool.submit(run_row, name): name for name in names}
        for done in as_completed(waiting):
            name = waiting[done]
            rows[name], problem = done.result()
            shown = ", ".join(check for check, cell in rows[name].cells.items() if cell == "yes")
            print(f"{len(rows):3} of {len(names)}  {name}: {shown}", flush=True)
            if problem:
                problems.append(problem)
                print(problem, file=sys.stderr, flush=True)
        for _ in range(num_processes):
            pool.submit(close_ranks)
    return rows, problems


def main() -> int:
    """Runs the families that are named, all without names, and writes the table."""
    parser = argparse.ArgumentParser(
        prog="./dev test-models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="rows of tests/models/make.py")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    known = all_rows()
    if unknown := set(args.families) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    begin = time.monotonic()
    rows, problems = run(run_row, args.families or list(known), args.processes)
    kept = PAGE.read_rows() if args.families else {}
    kept |= {row.name: row for row in rows.values()}
    PAGE.write_rows([kept[name] for name in sorted(kept, key=str.lower)])
    seconds = time.monotonic() - begin
    print(f"{len(rows)} rows in {seconds:.0f} s, {len(problems)} with failures; see {DOCS.name}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
