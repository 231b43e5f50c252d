"""Ranks over gloo in processes of their own, which stay for the tests of a file: to start one takes longer
than what it is asked for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RunRanks = Callable[..., list[list[dict[str, Any]]]]  # RankProcesses.run


class RankProcesses:
    """As many processes as were needed at once until now."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def run(
        self,
        size: int,
        folders: list[Path],
        rendezvous: Path,
        ep_size: int = 1,
        device: str = "cpu",
        mode: str = "none",
        adapters: list[Path] | None = None,
        threshold: float | None = None,
    ) -> list[list[dict[str, Any]]]:
        """What each rank says, one entry per model. `rendezvous`: a folder for files at which they meet. Two
        ranks without models try each method of collectives. `adapters`: of each model, one that its second
        prompt has. `threshold`: of steps that are cut in two; None: none are."""
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        while len(self.processes) < size:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.devices.cpu.tp_rank"],
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=ROOT,
                )
            )
        ranks = self.processes[:size]
        names = [""] * len(folders) if adapters is None else [str(adapter) for adapter in adapters]
        models = [
            (str(folder), str(rendezvous / f"{size}-{ep_size}-{device}-{mode}-{threshold}-{i}"), adapter)
            for i, (folder, adapter) in enumerate(zip(folders, names, strict=True))
        ]
        for rank, process in enumerate(ranks):
            assert process.stdin is not None
            process.stdin.write(
                json.dumps(
                    {
                        "rank": rank,
                        "size": size,
                        "ep_size": ep_size,
                        "device": device,
                        "mode": mode,
                        "threshold": threshold,
                        "models": models,
                        "methods": str(rendezvous / "methods"),
                    }
                )
                + "\n"
            )
            process.stdin.flush()
        lines = [process.stdout.readline() for process in ranks if process.stdout is not None]
        if not all(lines):
            self.close()
            raise AssertionError("a rank failed; what it said is above")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.processes.clear()
