"""`runtime check doctor --device npu --record FILE`: what this NPU answers to right and wrong calls of its
operators. The tables of calls are tests and so not part of the package, but of its repository."""

import subprocess
import sys
from pathlib import Path

from runtime.errors import StartError

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.ascend.answers"


def record(device: str, file: Path) -> None:
    """Writes `file`, a fixture for tests/ascend/test_answers.py. Raises StartError where that cannot be."""
    if device != "npu":
        raise StartError(f"--record asks an NPU, not {device}; add --device npu")
    if not (ROOT / Path(*MODULE.split("."))).with_suffix(".py").exists():
        raise StartError(
            "--record needs the tests of the repository: run it in a clone, with pip install -e ."
        )
    ended = subprocess.run([sys.executable, "-m", MODULE, str(file.resolve())], cwd=ROOT)
    if ended.returncode:
        raise StartError("the calls of --record cannot be made: see what was printed before")
