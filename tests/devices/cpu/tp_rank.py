"""One rank of a tensor-parallel pair, run as a process by test_collectives.py: plans the same steps on every rank.

Arguments: rank, number of ranks, then a model folder and a rendezvous file for each model. Prints a JSON line per model:
tokens as far as this rank knows them, and its own weights' bytes.
"""

import json
import sys

import torch

from tests.devices.drive import Planner, sampling, start

PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 70)), [200, 100]]


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    for folder, rendezvous in zip(sys.argv[3::2], sys.argv[4::2], strict=True):
        executor, ready = start(folder, rank, tp_size=size, rendezvous=rendezvous)
        planner = Planner(executor, ready, 4)
        wishes = [sampling(), sampling(prompt_logprobs=1, top_logprobs=1), sampling(temperature=0.8, top_p=0.9, seed=7, repetition_penalty=1.2)]
        rows = [planner.row(slot, prompt, wish) for slot, (prompt, wish) in enumerate(zip(PROMPTS, wishes, strict=True))]
        for i, row in enumerate(rows):
            planner.run(rows[:i], [(row, row.prompt_len)])
        for _ in range(16):
            planner.run(rows, [])
        last = executor.loaded.slots.last_token[:3].tolist()  # type: ignore[attr-defined]
        probabilities = [round(result[1], 3) for result in rows[1].results]
        print(json.dumps({"tokens": [row.tokens for row in rows], "last": last, "bytes": ready.weights_bytes, "logprobs": probabilities}))
        executor.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
