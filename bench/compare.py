"""A bench on this tree and on an older commit, in turns: machines drift by a third within minutes, so only
figures taken in turns say what a change did.

python -m bench.compare COMMIT [--turns 5] NAME [ARGUMENT ...]

The older commit is checked out next to the repository for the time of the comparison and runs in this
interpreter, so it must get along with the packages installed here. Each turn runs `python -m bench.NAME` once
for either tree; compared is what the bench records: every number that both trees have under the same path.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.record import RESULTS, record

ROOT = RESULTS.parent.parent


def main() -> None:
    """Runs the turns, prints the medians and records them."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("commit", help="the older commit, as git names it")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("name", help="the bench, as in python -m bench.NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="go to the bench")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        _git("worktree", "add", "--detach", str(base), given.commit)
        try:
            turns = [
                (run(base, given.name, given.arguments), run(ROOT, given.name, given.arguments))
                for _ in range(given.turns)
            ]
        finally:
            _git("worktree", "remove", "--force", str(base))
    figures = compare([before for before, _ in turns], [after for _, after in turns])
    for path, figure in figures.items():
        print(f"{path:60} {figure['before']:>12} {figure['after']:>12}   x {figure['ratio']}")
    commits = {
        "before": _git("rev-parse", "--short", given.commit),
        "after": _git("rev-parse", "--short", "HEAD"),
    }
    command = " ".join([given.name, *given.arguments])
    path = record(
        f"compare_{given.name}", {"command": command, "turns": given.turns, **commits, "figures": figures}
    )
    print(path)


def run(tree: Path, name: str, arguments: list[str]) -> dict[str, float]:
    """The numbers that the bench `name` of this tree records, by path. The tree's own record stays as it was.
    Raises CalledProcessError if the bench fails."""
    file = tree / "bench" / "results" / f"{name}.json"
    kept = file.read_bytes() if file.exists() else None
    try:
        subprocess.run(
            [sys.executable, "-m", f"bench.{name}", *arguments],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},  # also for the processes that the tree starts
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return dict(numbers(json.loads(file.read_bytes())["results"], ""))
    finally:
        if kept is not None:
            file.write_bytes(kept)


def compare(before: list[dict[str, float]], after: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each number that every run has: the medians of both trees and the median of the turns' ratios."""
    common = [path for path in before[0] if all(path in run for run in before + after)]
    return {
        path: {
            "before": round(median(run[path] for run in before), 4),
            "after": round(median(run[path] for run in after), 4),
            "ratio": round(median(new[path] / old[path] for old, new in zip(before, after, strict=True)), 3),
        }
        for path in common
        if all(run[path] for run in before)
    }


def numbers(value: object, path: str) -> Iterator[tuple[str, float]]:
    """The numbers in a JSON value, with their paths: `runs[2].streams`."""
    match value:
        case bool():
            return
        case int() | float():
            yield path, value
        case dict():
            for key, inner in value.items():
                yield from numbers(inner, f"{path}.{key}" if path else str(key))
        case list():
            for index, inner in enumerate(value):
                yield from numbers(inner, f"{path}[{index}]")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
