"""mypy finds nothing in the rooms without torch, and in ranks/. Its settings are in pyproject.toml."""

import ast
import subprocess
import sys

from tests.shape import source

ROOMS = (
    "actors",
    "admin",
    "cache",
    "core.py",
    "engine.py",
    "grammar",
    "http",
    "messages",
    "metrics",
    "models/config",
    "options",
    "parsing",
    "ranks",
    "rpc",
    "scheduling",
    "server.py",
    "service.py",
    "settings.py",
    "storage",
    "text",
)

# rooms in which a type can be named for everything but what these files hold
TYPED_ROOMS = ("devices", "layers", "models", "ranks")
UNTYPED = {
    "runtime/devices/cuda/attention_backends.py": "each backend has a type of plan of its own",
    "runtime/models/config/json_types.py": "JSON that other programs have written",
}


def test_types_are_named() -> None:
    """`Any` is where nothing better can be said, and nowhere else."""
    untyped = {
        str(path)
        for room in TYPED_ROOMS
        for path in source.files(f"runtime/{room}")
        if any(isinstance(node, ast.Name) and node.id == "Any" for node in source.nodes(path))
    }
    assert untyped == UNTYPED.keys()


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
