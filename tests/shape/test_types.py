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
    "host_settings.py",
    "http",
    "media",
    "media_settings.py",
    "messages",
    "metrics",
    "node.py",
    "nodes",
    "models/config",
    "options",
    "parsing",
    "pdmux_settings.py",
    "preparation",
    "ranks",
    "ray.py",
    "rpc",
    "scheduling",
    "server.py",
    "transfer",
    "service.py",
    "settings.py",
    "storage",
    "text",
)

# files that name Any, and what for
UNTYPED = {
    "runtime/devices/cuda/attention_backends.py": "each backend has a type of plan of its own",
    "runtime/devices/cuda/cudnn_pages.py": "nvidia-cudnn-frontend has no types",
    "runtime/devices/cuda/compile_ahead.py": "arguments of any kernel, and of any operator of torch",
    "runtime/layers/attention/spans.py": "each device has a type of plan of its own",
    "runtime/models/transformers_media.py": "arguments of any model of transformers",
    "runtime/text/transformers_process.py": "processors of transformers, which have no common type",
    "runtime/engine.py": "parameters that the caller names, checked against SamplingParams",
    "runtime/http/fields/constraint.py": "readers of fields, each of its field's type",
    "runtime/http/openai/stored/disk.py": "calls of a thread, of any result",
    "runtime/http/operation.py": "functions of rows, each of which takes its row's body",
    "runtime/json_value.py": "fields that msgspec reads, objects yet to be made, and files of other programs",
    "runtime/options/declare.py": "values of options, each of which has a type of its own",
    "runtime/options/table.py": "a type, for msgspec",
    "runtime/grammar/quoted_regex.py": "the parser of the standard library has no types",
    "runtime/text/stop_regex.py": "google-re2 has no types",
}


def test_types_are_named() -> None:
    """`Any` is where nothing better can be said, and nowhere else. Values of unknown type are `object`, JSON
    is `JsonValue` (json_value.py)."""
    untyped = {
        str(path)
        for path in source.files("runtime")
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
