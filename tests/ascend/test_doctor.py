"""`runtime check doctor --bench` on a simulated NPU: every figure comes, and none means anything."""

import subprocess
import sys

import msgspec
import pytest

pytestmark = pytest.mark.ascend


def test_an_npu_is_examined_and_measured() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "runtime",
            "check",
            "doctor",
            "--device",
            "npu",
            "--bench",
            "--shrink",
            "32",
            "--json",
        ],
        capture_output=True,
        text=True,
    )
    found = msgspec.json.decode(ended.stdout)
    measured, names = found["measured"], {finding["name"] for finding in found["findings"]}
    assert ended.returncode in (0, 1), "whatever this machine lacks of an NPU's"
    assert (measured["device"], measured["dtype"], measured["ranks"]) == ("npu", "bfloat16", 1)
    assert len(measured["figures"]) == 6 and any("torch_npu" in name for name in names)
