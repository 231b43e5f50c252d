"""Captured steps of two attention groups, on two ranks: tokens are those of one rank without groups, and
every step without prompts is replayed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.messages.steps import Admit, GroupSteps, StepPlan
from runtime.ranks.replays import GroupReplays
from runtime.ranks.sampling_needs import SamplingNeeds
from tests.devices.cpu.grouped_rank import PARAMS, PROMPTS, STEPS, adapt, setup_of
from tests.devices.cpu.ranks import RankProcess
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.make_adapter import make_adapter

EXCHANGE: dict[str, Any] = {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency", "ep_size": 2}
OWN_HEADS = {"has_group_heads": True}
# family, options, whether the model drafts for itself, and of each phase the replays of a step: of a group
# with rows, and of one without
CASES: list[tuple[str, dict[str, Any], bool, int, int]] = [
    ("llama", OWN_HEADS, False, 2, 1),
    ("qwen3", {}, False, 1, 1),  # a head that the groups share is computed behind the graph
    ("qwen3_moe", OWN_HEADS | EXCHANGE, False, 2, 1),
    ("deepseek_v3", OWN_HEADS | {"expert_steps": 4}, True, 0, 0),
    ("qwen2_moe", OWN_HEADS | {"adapters": 2}, False, 2, 1),
    ("qwen2_moe", OWN_HEADS | EXCHANGE | {"adapters": 2}, False, 2, 1),
]


def alone(folder: Path, adapters: list[str]) -> list[list[list[int]]]:
    """What follows each prompt on one rank."""
    executor, ready = start(folder, max_len=128, adapters=setup_of(adapters))
    planner = Planner(executor, ready, 4)
    found = []
    for group, prompts in enumerate(PROMPTS):
        rows = [planner.row(i, prompt, sampling(**PARAMS[i])) for i, prompt in enumerate(prompts)]
        if adapters:
            adapt(planner, rows, group)
        found.append([planner.generate(row, 6 * STEPS) for row in rows])
    executor.close()
    return found


def test_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    folders = [make_checkpoint(case[0], tmp_path / str(i)) for i, case in enumerate(CASES)]
    (tmp_path / "rendezvous").mkdir()
    adapters = [
        [
            str(make_adapter(folder, folder / f"adapter-{i}", seed=i))
            for i in range(case[1].get("adapters", 0))
        ]
        for case, folder in zip(CASES, folders, strict=True)
    ]
    jobs = [
        [case[1] | {"folder": str(folder), "adapters": own}, str(folder) if case[2] else ""]
        for case, folder, own in zip(CASES, folders, adapters, strict=True)
    ]
    ranks = [
        RankProcess("tests.devices.cpu.grouped_rank", str(rank), str(tmp_path / "rendezvous"))
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            for job in jobs:
                rank.ask(job)
        answers = [[rank.answer() for _ in jobs] for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()
    for folder, case, given, *found in zip(folders, CASES, adapters, *answers, strict=True):
        for own, expected in zip(found, alone(folder, given), strict=True):
            for tokens, truth in zip(own["tokens"], expected, strict=True):
                count = min(len(tokens), len(truth))
                assert count >= 2 * STEPS and tokens[:count] == truth[:count], case
        assert not given or alone(folder, given) != alone(folder, []), "adapters change something"
        _, _, drafts, busy, idle = case
        first, second = (own["replays"] for own in found)
        if drafts:
            assert all(first) and all(second)
            assert first[0] > second[1] and first[3] > 3 * STEPS, (
                "passes of the draft model, and the target's"
            )
            assert len(found[0]["tokens"][1]) > 5 * STEPS, "its drafts are right"
        else:
            assert first == [STEPS * each for each in (busy, busy, idle, busy)], case
            assert second == [STEPS * each for each in (busy, idle, busy, busy)], case


class Graphs:
    """Has a graph for any plans."""

    def __init__(self) -> None:
        self.given: list[tuple[int, bool]] = []

    def shape_of(self, plans: list[StepPlan], needs: list[SamplingNeeds]) -> tuple[int, int]:
        self.given = [
            (plan.step, bool(own.is_plain[plan.slots].all())) for plan, own in zip(plans, needs, strict=True)
        ]
        return 2, 3


class Runner:
    def __init__(self) -> None:
        self.verifies, self.graphs = Graphs(), None
        self.slots = type("Slots", (), {"padding": 4, "vocab_size": 9, "needs": SamplingNeeds(4, 9)})()


def plan_of(step: int, *admits: Admit) -> StepPlan:
    slots = np.array([1], np.int32)
    return StepPlan(
        step=step, num_decodes=1, slots=slots, counts=slots, samples=slots.astype(np.uint8), admits=[*admits]
    )


@pytest.mark.parametrize("width", [-1, 2])
def test_ranks_know_what_rows_of_other_groups_ask_for(width: int) -> None:
    runner: Any = Runner()
    replays = GroupReplays(runner, 3, 1)
    admit = Admit(1, sampling(top_logprobs=width), 1, np.zeros(1, np.int32))
    for step in (
        GroupSteps(1, [plan_of(1, admit), None, None]),
        GroupSteps(2, [plan_of(2), plan_of(3), None]),
    ):
        found = replays.find(step)
    assert found is not None and found.shape == (2, 3)
    assert runner.verifies.given == [(2, width < 0), (3, True)]
