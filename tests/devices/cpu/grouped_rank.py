"""One of two ranks, each an attention group of its own, whose steps are captured; run as a process by
tests/ranks/test_group_graphs.py. Arguments: descriptors of jobs and answers, rank, folder of rendezvous.
Reads a job a line (options of the start, and the folder of the draft model or ""), and answers each with a
line of JSON.

Options may have "adapters", the folder of one for each group. Of each job: the tokens behind each prompt of
its own group, and how many graphs each phase has replayed.
"""

import json
import os
import sys
from typing import Any

import torch

from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.steps import GroupSteps
from runtime.ranks import open_executor
from runtime.scheduling.drafts import Draft
from tests.devices.drive import Planner, Row, sampling, speculation, start
from tests.models.make_adapter import ALL
from tests.ranks.lora_slots import assigned

PROMPTS = [[[5, 9, 100, 7], [i * 7 % 250 for i in range(19)], [3, 4]], [[11, 12, 13, 14, 15]]]
PARAMS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": -3}, {}]
SIZES = [2, 4]
STEPS = 4
Plans = tuple[list[Row], list[tuple[Row, int]], list[tuple[Row, Draft]]]


class Groups:
    """Both groups' plans, on the rank of one."""

    def __init__(self, rank: int, planners: list[Planner]) -> None:
        self.own = rank
        self.planners = planners
        self.step = 0

    def run(self, *wanted: Plans | None) -> None:
        """A step of what each group computes; None: nothing."""
        plans = [
            None if rows is None else planner.plan(*rows)
            for planner, rows in zip(self.planners, wanted, strict=True)
        ]
        self.step += 1
        result = self.planners[self.own].executor.launch_group(GroupSteps(self.step, plans)).result()
        plan, rows = plans[self.own], wanted[self.own]
        assert (plan is None) == (result is None), "each group's only rank answers for it"
        if plan is None or rows is None or result is None:
            return
        each = [*rows[0], *(row for row, _ in rows[2]), *(row for row, _ in rows[1])]
        sampled = [row for row, samples in zip(each, plan.samples, strict=True) if samples]
        counts = [1] * len(sampled) if result.num_tokens is None else result.num_tokens.tolist()
        tokens = iter(result.token_ids.tolist())
        for row, count in zip(sampled, counts, strict=True):
            row.tokens += [next(tokens) for _ in range(count)]


def setup_of(folders: list[str]) -> AdapterSetup | None:
    """One LoRA slot of a group, and an adapter of each group; None: there are no adapters."""
    loads = [LoadAdapter(id, folder) for id, folder in enumerate(folders, 1)]
    return AdapterSetup(num_lora_slots=1, max_rank=4, targets=ALL, loaded=loads) if loads else None


def adapt(planner: Planner, rows: list[Row], group: int) -> None:
    """The group's adapter is in its slot, and all rows have it but the first one of group 0."""
    planner.lora_assignment = assigned(s0=group + 1)
    for row in rows[group == 0 :]:
        row.lora_slot = 0


def answer(rank: int, rendezvous: str, options: dict[str, Any], draft: str) -> dict[str, Any]:
    executor: Any
    adapters = setup_of(options.pop("adapters", []))
    executor, ready = start(
        options.pop("folder"),
        rank,
        tp_size=2,
        attention_groups=2,
        rendezvous=rendezvous,
        device="taped",
        graph_sizes=SIZES,
        max_len=128,
        speculation=speculation("STANDALONE", draft) if draft else None,
        adapters=adapters,
        **options,
    )
    planners = [Planner(executor, ready, 4) for _ in PROMPTS]
    groups = Groups(rank, planners)
    rows: list[list[Row]] = []
    for planner, prompts in zip(planners, PROMPTS, strict=True):
        planner.follows = bool(draft)
        rows.append([planner.row(i, prompt, sampling(**PARAMS[i])) for i, prompt in enumerate(prompts)])
        for row in rows[-1]:  # pages for whatever drafts are accepted
            row.pages = [planner.free.pop() for _ in range((len(row.tokens) + 20 * STEPS) // 4 + 2)]
    for group, planner in enumerate(planners if adapters else []):
        adapt(planner, rows[group], group)
    for i, row in enumerate(rows[0]):
        last = rows[1][0]
        extends = [] if i else [(last, last.prompt_len)]
        groups.run((rows[0][:i], [(row, row.prompt_len)], []), (rows[1] if i else [], extends, []))
    replays = []
    both: list[Plans | None] = [(rows[0], [], []), (rows[1], [], [])]
    drafts: list[Plans | None] = [(rows[0][:1], [], [(row, Draft.own(3)) for row in rows[0][1:]]), both[1]]
    for wanted in (both, [both[0], None], [None, both[1]], drafts if draft else both):
        before = executor.tapes.replays
        for _ in range(STEPS):
            groups.run(*wanted)
        replays.append(executor.tapes.replays - before)
    found = {"tokens": [row.tokens[row.prompt_len :] for row in rows[rank]], "replays": replays}
    executor.close()
    return found


def main() -> None:
    jobs, answers = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:3], "rw", strict=True))
    rank, folder = int(sys.argv[3]), sys.argv[4]
    open_executor.DEVICES["taped"] = "tests.devices.taped"
    for number, line in enumerate(jobs):
        options, draft = json.loads(line)
        print(json.dumps(answer(rank, f"{folder}/{number}", options, draft)), file=answers, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
