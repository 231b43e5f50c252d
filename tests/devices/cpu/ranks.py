"""Ranks over gloo in processes of their own, which stay for the tests of a file. They are forked from one
process that has imported what they need: the import takes longer than what they are asked for."""

import atexit
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from select import select
from typing import Any

from runtime.actors.child_environment import environment
from tests.launcher import Launcher

RunRanks = Callable[..., list[list[dict[str, Any]]]]  # RankProcesses.run
TIMEOUT_S = 600.0
IMPORTED = (
    "runtime.devices.cpu.device",
    "tests.devices.drive",
    "tests.devices.taped",
    "tests.ranks.lora_slots",
)


@cache
def launcher() -> Launcher:
    """What forks the ranks of this process of the suite."""
    started = Launcher(environment(1), IMPORTED)
    atexit.register(started.close)
    return started


class RankProcess:
    """A process of a module that answers lines on the first descriptor of its arguments with lines on the
    second one."""

    def __init__(self, module: str, *arguments: str) -> None:
        jobs, self._jobs = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = launcher().start(module, (str(jobs), str(answers), *arguments), (jobs, answers))
        finally:
            os.close(jobs)
            os.close(answers)
        self._come = b""  # of the next answers

    def ask(self, job: object) -> None:
        """Gives it a job, which `answer` waits for."""
        line = json.dumps(job).encode() + b"\n"
        while line:
            line = line[os.write(self._jobs, line) :]

    def answer(self) -> Any:
        """The next line. Raises AssertionError where the process has ended, or says nothing for long."""
        while b"\n" not in self._come:
            ready, _, _ = select([self._answers], [], [], TIMEOUT_S)
            assert ready, f"a rank says nothing for {TIMEOUT_S} s"
            part = os.read(self._answers, 1 << 16)
            assert part, "a rank failed; what it said is above"
            self._come += part
        line, _, self._come = self._come.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._jobs)
        os.close(self._answers)


class RankProcesses:
    """As many processes as were needed at once until now."""

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []

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
        while len(self.processes) < size:
            self.processes.append(RankProcess("tests.devices.cpu.tp_rank"))
        ranks = self.processes[:size]
        names = [""] * len(folders) if adapters is None else [str(adapter) for adapter in adapters]
        models = [
            (str(folder), str(rendezvous / f"{size}-{ep_size}-{device}-{mode}-{threshold}-{i}"), adapter)
            for i, (folder, adapter) in enumerate(zip(folders, names, strict=True))
        ]
        for rank, process in enumerate(ranks):
            process.ask(
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
        try:
            return [process.answer() for process in ranks]
        except AssertionError:
            self.close()
            raise

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.processes.clear()
