"""One of two ranks that draft and verify with captured steps, run as a process by
tests/ranks/test_verify_graphs.py. Arguments: descriptors of jobs and answers. Reads a job: rank, model
folder, rendezvous, algorithm, folder of the draft model, prompts.

Answers with a line of JSON: the tokens behind each prompt, which rank 0 alone is told, each slot's last
token, and how many graphs were replayed.
"""

import json
import os
import sys
from typing import Any

import torch

from runtime.ranks import open_executor
from runtime.scheduling.drafts import Draft
from tests.devices.drive import Planner, sampling, speculation, start

STEPS = 8
SIZES = [2, 4]


def main() -> None:
    jobs, answers = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:], "rw", strict=True))
    rank, folder, rendezvous, algorithm, draft, prompts = json.loads(jobs.readline())
    open_executor.DEVICES["taped"] = "tests.devices.taped"
    executor: Any
    executor, ready = start(
        folder,
        rank,
        tp_size=2,
        rendezvous=rendezvous,
        device="taped",
        graph_sizes=SIZES,
        speculation=speculation(algorithm, draft),
        max_len=128,
    )
    planner = Planner(executor, ready, 4)
    planner.follows = True
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts)]
    for row in rows:
        # rank 1 is not told what is accepted: pages for whatever it may be
        row.pages = [planner.free.pop() for _ in range((len(row.tokens) + 5 * STEPS) // 4 + 2)]
        planner.prefill(row)
    before = executor.tapes.replays
    for step in range(STEPS):
        planner.run(rows[:1], [], [(row, Draft.own(1 + (step + row.slot) % 4)) for row in rows[1:]])
    found = {
        "tokens": [row.tokens[row.prompt_len :] for row in rows],
        "last": executor.runner.slots.last_token[: len(rows)].tolist(),
        "replays": executor.tapes.replays - before,
    }
    executor.close()
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
