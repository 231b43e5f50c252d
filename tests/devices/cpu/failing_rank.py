"""One of two ranks whose captures fail, run as a process by test_failing.py. Arguments: descriptors of jobs
and answers. Reads a job: rank, model folder, rendezvous.

Answers what became of each capture, a JSON line each: one that fails on both ranks alike, one whose greedy
tape fails on rank 1, one that comes off, and one in whose trial run rank 1 fails between two exchanges.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor

from runtime.devices import rendezvous as rendezvous
from runtime.ranks import open_executor
from runtime.ranks.graph_setup import GraphSetup
from runtime.ranks.open_graphs import open_graphs
from tests.devices.drive import start


def main() -> None:
    jobs, answers = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:], "rw", strict=True))
    rank, folder, place = json.loads(jobs.readline())
    open_executor.DEVICES["taped"] = "tests.devices.taped"
    executor: Any
    executor, _ = start(folder, rank, tp_size=2, rendezvous=place, device="taped")
    executor.runner.graph_setup = GraphSetup([1, 2, 3, 4])
    executor.runner.graphs, _, _ = open_graphs(executor.runner)
    mlp = executor.runner.model.layers[0].mlp
    forward = mlp.forward
    rendezvous.FAILED_TIMEOUT_S = 60.0

    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room\nat all")

    def capture(size: int) -> None:
        found = executor.capture(size)
        answer = [found.error, found.is_fatal, executor.runner.graphs.ready]
        print(json.dumps(answer), file=answers, flush=True)

    mlp.forward = full
    capture(1)
    mlp.forward = forward
    executor.tapes.fails_at = 1 if rank == 1 else None
    capture(2)
    capture(3)
    rendezvous.FAILED_TIMEOUT_S = 0.5
    mlp.forward = full if rank == 1 else forward
    capture(4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
