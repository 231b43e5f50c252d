"""The examples run as they stand, against a server with the embedded model."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Server, serve
from tests.shape.source import ROOT

EXAMPLES = ROOT / "examples"
# a client -> what it prints
CLIENTS = {
    "chat.py": r"\w",
    "claude.py": r"\w",
    "tool_loop.py": r"tool: get_weather\(.*\) -> \{'city': .*\nanswer: ",
    "structured.py": r"verdict='(good|bad|mixed)' stars=[1-5] words=\[",
    "batch.py": r"completed BatchRequestCounts\(completed=5, failed=0, total=5\)\n(sum-\d .*\n?){1,}",
}
MOUNTED = """
import anyio, httpx
from mounted import app
async def main():
    async with app.router.lifespan_context(app), httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://app"
    ) as client:
        print((await client.get("/")).text, (await client.get("/llm/v1/models")).json()["data"][0]["id"])
if __name__ == "__main__":
    anyio.run(main)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(
        "--model-path", "pocket", "--file-storage-path", str(tmp_path_factory.mktemp("files"))
    ) as running:
        yield running


def output(path: Path, url: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"RUNTIME_URL": url, "PYTHONPATH": f"{ROOT}:{EXAMPLES}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CLIENTS)
def test_clients(name: str, server: Server) -> None:
    printed = output(EXAMPLES / name, server.url)
    assert re.match(CLIENTS[name], printed), printed


def test_the_library() -> None:
    lines = output(EXAMPLES / "library.py").splitlines()
    assert len(lines) >= 3 and sum(line.startswith("- ") for line in lines) == 2


def test_the_mounted_app(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(MOUNTED)
    assert output(tmp_path / "ask.py") == "The model is at /llm/v1/chat/completions. pocket\n"


def test_all_are_listed_and_run() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*CLIENTS, "library.py", "mounted.py"}
    listed = set(re.findall(r"^\| \[([\w.]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == names
