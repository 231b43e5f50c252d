"""mypy finds nothing in the rooms without torch. Its settings are in pyproject.toml."""

import subprocess
import sys

from tests.shape import source

ROOMS = (
    "actors",
    "admin",
    "cache",
    "grammar",
    "messages",
    "metrics",
    "options",
    "parsing",
    "scheduling",
    "storage",
    "text",
)


def test_types_fit() -> None:
    """Takes 10 s of a core when nothing is in .mypy_cache: a checker reads all that these rooms import."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *(f"runtime/{room}" for room in ROOMS)],
        cwd=source.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
