"""The wall clock may jump by hours. It is for dates that people and other programs read; every deadline,
pause and measured time uses a clock that only goes forward."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shape import source

# functions of the wall clock, by module
WALL = {"time": {"time", "time_ns", "ctime", "localtime", "gmtime"}, "datetime": {"now", "utcnow", "today"}}
# files that read it, and what for
READERS = {
    "runtime/actors/events.py": "dates of cache events",
    "runtime/admin/adapter_registry.py": "created",
    "runtime/admin/status.py": "when the adapters in use were looked up, which is a date in the protocol",
    "runtime/http/anthropic/message_batches.py": "dates of batches",
    "runtime/http/embeddings/embeddings.py": "created",
    "runtime/http/embeddings/scores.py": "created",
    "runtime/http/native/load.py": "timestamp",
    "runtime/http/ollama/serve.py": "created_at",
    "runtime/http/openai/batch_runner.py": "what is left of a window that clients know as a date",
    "runtime/http/openai/batches.py": "dates of batches",
    "runtime/http/openai/conversations/store.py": "created_at",
    "runtime/http/openai/envelope.py": "created",
    "runtime/http/openai/files.py": "created_at",
    "runtime/http/openai/responses/serve.py": "created_at",
    "runtime/http/openai/responses/writer.py": "completed_at",
    "runtime/http/openai/uploads/store.py": "expires_at, which clients know as a date",
    "runtime/http/http2_stream.py": "the header Date",
    "runtime/http/request_cycle.py": "the header Date",
    "runtime/model_card.py": "created",
    "runtime/metrics/crash_dump.py": "names of files",
    "runtime/metrics/request_log.py": "names of files, and dates in them",
    "runtime/ranks/checkpoint_key.py": "whether a file's date is now",
    "runtime/ranks/expert_counts.py": "names of files",
    "runtime/storage/files.py": "dates of use, which servers share as dates of files",
    "runtime/text/jinja_sandbox.py": "strftime_now of chat templates",
}


def reads(path: Path) -> Iterator[str]:
    """Calls of the wall clock in a file."""
    named = {
        alias.asname or alias.name
        for node in source.nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
        if alias.name in WALL["time"]
    }
    for node in source.nodes(path):
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        owner, _, name = call.rpartition(".")
        if call in named or name in WALL.get(owner.rpartition(".")[2], ()):
            yield f"{path}:{node.lineno}: {call}() is the wall clock; use monotonic, or say why in READERS"


def test_nothing_but_dates_uses_the_wall_clock() -> None:
    found = {str(path): list(reads(path)) for path in source.files("runtime")}
    unknown = [line for path, lines in found.items() if path not in READERS for line in lines]
    assert not unknown, "\n".join(unknown)
    assert not [path for path in READERS if not found.get(path)], "these read it no more"


@pytest.mark.parametrize(
    "code, count",
    [
        ("import time\nx = time.time() + 5\n", 1),
        ("from time import time as now, monotonic\nx = now() - monotonic()\n", 1),
        ("import datetime\nx = datetime.datetime.now()\n", 1),
        ("import time\nx = time.monotonic() - time.perf_counter()\nloop.time()\n", 0),
    ],
)
def test_it_is_found(code: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = Path(f"clock_{abs(hash((code, tmp_path)))}.py")  # trees are cached by name
    (tmp_path / name).write_text(code)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert len(list(reads(name))) == count
