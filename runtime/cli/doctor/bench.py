"""Starts the measurement of a device, one process a rank, and reads what rank 0 found."""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from runtime.actors.child_environment import environment
from runtime.errors import StartError
from runtime.ranks.benchmark_results import Measured

LIMIT_S = 300.0


def bench(device: str, ranks: int, variables: dict[str, str], shrink: int | None = None) -> Measured:
    """`shrink` divides sizes. Raises StartError where the device cannot be opened, or does not finish in five
    minutes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-P",
            "-m",
            "runtime.ranks.benchmark",
            "--device",
            device,
            "--ranks",
            str(ranks),
            "--rendezvous",
            str(Path(folder) / "meet"),
            *(() if shrink is None else ("--shrink", str(shrink))),
        ]
        processes = [
            subprocess.Popen(
                [*words, "--rank", str(rank)],
                env=environment(None) | variables,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        try:
            ended = [(*process.communicate(timeout=LIMIT_S), process.returncode) for process in processes]
        except subprocess.TimeoutExpired:
            raise StartError(
                f"--device {device} did not finish its measurement in {LIMIT_S:.0f} seconds; look at its "
                "driver"
            ) from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    failed = next((stderr for _, stderr, code in ended if code), None)
    if failed is not None:
        raise StartError(
            f"--device {device} cannot be measured: "
            f"{(failed.strip().splitlines() or ['it ended without a word'])[-1]}"
        )
    return msgspec.json.decode(ended[0][0].strip().splitlines()[-1], type=Measured)
