"""The two commands of the README, as far as they can be tested without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.shape.source import ROOT


@pytest.mark.parametrize(
    ("shell", "script"),
    [("sh", "dev"), ("bash", ".ci/run"), ("bash", "tests/cuda/run.sh"), ("sh", "tests/cuda/wheels.sh")],
)
def test_scripts_can_be_parsed_and_run(shell: str, script: str) -> None:
    subprocess.run([shell, "-n", ROOT / script], check=True)
    assert os.access(ROOT / script, os.X_OK)


def test_a_missing_python_is_named_with_its_remedy(tmp_path: Path) -> None:
    shutil.copy(ROOT / "dev", tmp_path)
    done = subprocess.run(
        ["./dev", "serve"],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("dev: no Python 3.11 or newer; install one")
    assert not (tmp_path / ".venv").exists()


def test_continuous_integration_runs_the_same_command() -> None:
    assert "./dev test" in (ROOT / ".ci" / "run").read_text()
