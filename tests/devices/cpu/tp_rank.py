"""One of the processes of ranks.py. Arguments: descriptors of jobs and answers. Reads a job a line, plans the
same steps on every rank, and answers with a line of JSON.

Of each model: tokens as far as this rank knows them, its last tokens, its own weights' bytes, and log
probabilities.
"""

import json
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch

from runtime.devices.cpu.collectives import GlooCollectives
from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.ranks import CountExperts, StepOverlap
from runtime.ranks import open_executor
from tests.devices.drive import Planner, sampling, start
from tests.ranks.lora_slots import assigned, leaves

PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 70)), [200, 100]]


def exchange(rank: int, rendezvous: str) -> None:
    """Each method's meaning, on two ranks."""
    ranks = GlooCollectives(rank, 2, rendezvous)
    mine = torch.arange(4.0).view(4, 1) + 10 * rank
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert ranks.all_reduce(mine.to(dtype, copy=True)).flatten().tolist() == [10, 12, 14, 16]
    assert ranks.all_gather(mine, 1).tolist() == [[0, 10], [1, 11], [2, 12], [3, 13]]
    assert ranks.reduce_scatter(mine.clone()).flatten().tolist() == [[10, 12], [14, 16]][rank]
    assert ranks.all_to_all(mine).flatten().tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
    mine = mine[: 3 - rank]  # two rows to themselves, one of rank 0 to rank 1
    assert (
        ranks.all_to_all(mine, [[2, 1], [0, 2]][rank], [[2, 0], [1, 2]][rank]).flatten().tolist()
        == [[0, 1], [2, 10, 11]][rank]
    )
    mine = torch.arange(4.0).view(4, 1) + 10 * rank
    assert ranks.broadcast(mine.clone()).flatten().tolist() == [0, 1, 2, 3]
    ranks.close()


def setup_of(folder: str, adapter: str) -> AdapterSetup:
    """A LoRA slot with room for this adapter in all modules that can be changed."""
    loaded = [LoadAdapter(1, adapter)]
    return AdapterSetup(num_lora_slots=1, max_rank=6, targets=leaves(Path(folder)), loaded=loaded)


def count_overlaps(executor: Any) -> "count[int]":
    """The number of its next value: of collectives since now with something to compute meanwhile."""
    ranks, numbers = executor.runner.device.collectives, count()
    plain = ranks.wait if executor.runner.device.collectives.size > 1 else None

    def wait(work: Any) -> None:
        if work is not None:
            next(numbers)
        plain(work)

    if plain is not None:
        ranks.wait = wait
    return numbers


def answer(
    folder: str,
    rendezvous: str,
    adapter: str,
    rank: int,
    size: int,
    ep_size: int,
    device: str,
    mode: str,
    threshold: float | None,
) -> dict[str, Any]:
    """`adapter`: the folder of one that the second prompt has; "": none has one. `threshold`: of steps that
    are cut in two; None: none are."""
    way = {} if mode == "none" else {"moe_a2a_backend": "deepep", "deepep_mode": mode}
    executor, ready = start(
        folder,
        rank,
        tp_size=size,
        ep_size=ep_size,
        rendezvous=rendezvous,
        device=device,
        **way,
        overlap=StepOverlap()
        if threshold is None
        else StepOverlap(two_batches=True, threshold=threshold, shared_experts=mode != "none"),
        adapters=setup_of(folder, adapter) if adapter else None,
        expert_steps=4,
        num_states=12,
        graph_sizes=[2, 4] if device == "taped" else [],
        piecewise_sizes=[32] if device == "taped" and mode == "none" else [],
    )
    planner, overlaps = Planner(executor, ready, 4), count_overlaps(executor)
    random = sampling(temperature=0.8, top_p=0.9, seed=7, repetition_penalty=1.2)
    all_params = [sampling(), sampling(prompt_logprobs=1, top_logprobs=1), random]
    rows = [
        planner.row(slot, prompt, params)
        for slot, (prompt, params) in enumerate(zip(PROMPTS, all_params, strict=True))
    ]
    if adapter:
        planner.lora_assignment, rows[1].lora_slot = assigned(s0=1), 0
    for i, row in enumerate(rows):
        planner.run(rows[:i], [(row, row.prompt_len)])
    for batch in (rows, rows[:1]):
        for _ in range(8):
            planner.run(batch, [])
    if device == "taped":
        loaded: Any = executor.runner  # type: ignore[attr-defined]
        in_pieces = (
            0 if loaded.piecewise is None else sum(i + len(prompt) <= 32 for i, prompt in enumerate(PROMPTS))
        )
        assert in_pieces > 0 or mode != "none"
        passes = [] if loaded.piecewise is None else loaded.piecewise.recorded.values()
        pieces = in_pieces * max((len(one.plain.pieces) for one in passes), default=0)
        replays: int = executor.tapes.replays  # type: ignore[attr-defined]
        assert replays == 8 + 2 * 8 + pieces, "forwards of all rows, and of one with its choice"
    last = executor.runner.slots.last_token[:3].tolist()  # type: ignore[attr-defined]
    probabilities = [round(result[1], 3) for result in rows[1].results]
    counts: list[int] = []
    if executor.runner.load is not None:  # type: ignore[attr-defined]
        report = executor.count_experts(CountExperts(1, "read")).result()
        assert (report is None) == (rank > 0)
        counts = [] if report is None else report.counts.tolist()  # type: ignore[union-attr]
    executor.close()
    return {
        "overlaps": next(overlaps),
        "counts": counts,
        "tokens": [row.tokens for row in rows],
        "last": last,
        "bytes": ready.weights_bytes,
        "logprobs": probabilities,
    }


def main() -> None:
    open_executor.DEVICES["taped"] = "tests.devices.taped"
    open_executor.DEVICES["summing"] = "tests.devices.cuda.summing"
    jobs, answers = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:], "rw", strict=True))
    for line in jobs:
        job = json.loads(line)
        models, methods = job.pop("models"), job.pop("methods")
        if not models:
            exchange(job["rank"], methods)
        print(json.dumps([answer(*model, **job) for model in models]), file=answers, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
