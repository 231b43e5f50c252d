"""How many launches a captured decode step has, for each layer and beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.cuda.torch_device import HAS_GPU

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(HAS_GPU, reason="counts without a GPU")


def counted(folder: Path, fusion: str, rows: int, **options: Any) -> dict[str, dict[str, int]]:
    """What tests.devices.cuda.launch_counts finds, in a process of its own: here kernels are interpreted."""
    arguments = map(str, (folder, fusion, rows, json.dumps(options)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.cuda.launch_counts", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found
