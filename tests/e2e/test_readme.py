"""The snippets of the README run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.options.parse import from_argv
from tests.e2e.serving import serve
from tests.shape.source import ROOT

README = (ROOT / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^(?:\./dev|runtime) serve ?(.*?)\s*(?:#.*)?$", README, re.MULTILINE)


def output(snippet: str, folder: Path) -> str:
    (folder / "snippet.py").write_text(snippet)
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_request(tmp_path: Path) -> None:
    """On another port, for the one that is written may be taken."""
    with serve("--model-path", "pocket") as server:
        assert output(SNIPPETS[0].replace("http://127.0.0.1:30000", server.url), tmp_path).strip()


def test_the_library(tmp_path: Path) -> None:
    assert "1" in output(SNIPPETS[1], tmp_path)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_options_of_its_commands_are_known(arguments: str) -> None:
    from_argv(arguments.split())


def test_nothing_is_left_out() -> None:
    assert len(SNIPPETS) == 2 and len(COMMANDS) >= 2
