"""Captures that fail on one of two ranks, or on both, over gloo in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.models.make import make_checkpoint


def test_a_failure_on_one_rank_is_reported_at_once(tmp_path: Path) -> None:
    """Where the other one has come to its end as well, both give the size up; else the one that failed says
    that it is waited for."""
    folder = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=2)
    program = [sys.executable, "-m", "tests.devices.cpu.failing_rank"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(folder), str(tmp_path / "meeting")],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == 0
    finally:
        ranks[0].kill()
    first, _ = ranks[0].communicate()
    full, stranded = (
        "OutOfMemoryError: no room",
        "another rank has reported nothing since and may wait for this one",
    )
    assert [json.loads(line) for line in first.splitlines() if line[0] == "["][:3] == [
        [full, False, []],
        ["another rank could not (OutOfMemoryError: no room for a tape)", False, []],
        ["", False, [3]],
    ]
    assert [json.loads(line) for line in output.splitlines() if line[0] == "["] == [
        [full, False, []],
        ["OutOfMemoryError: no room for a tape", False, []],
        ["", False, [3]],
        [f"{full}; {stranded}", True, [3]],
    ]
