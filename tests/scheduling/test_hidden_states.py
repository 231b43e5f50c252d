"""Hidden states and embeddings in plans: each token brings its own, once, whatever the chunks, preemptions
and deaths of ranks."""

from random import Random

import numpy as np
import pytest

from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import StepPlan, StepResult
from runtime.scheduling import flight
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.scheduling.positions import Positions

NOTHING = np.zeros(0, np.float32)
NEW_TOKENS = 9
KINDS = ("all", "last", None)


def make(num_pages: int, conservativeness: float = 0.0) -> Scheduler:
    """Sequences are admitted without much thought, and give way."""
    return Scheduler(
        SchedulerConfig(
            max_running=4,
            max_step_tokens=8,
            max_len=40,
            page_size=4,
            num_pages=num_pages,
            eos_ids=(7,),
            conservativeness=conservativeness,
        )
    )


def request(name: str, prompt: list[int], number: int, kind: str | None, *, is_embedded: bool) -> Request:
    params = SamplingParams(hidden_states=kind, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    rows = (
        np.stack([np.full(len(prompt), number), np.arange(len(prompt))], axis=1).astype(np.float32)
        if is_embedded
        else None
    )
    return Request(
        id=name,
        prompt_ids=prompt,
        params=params,
        seed=1,
        arrival_s=0,
        embeds=rows,
        namespace=name if is_embedded else "",
    )


class Rank:
    """Its hidden states are positions. It notes which rows of embeddings each slot was given."""

    def __init__(self) -> None:
        # number of the request, position of the token, row of the embeddings
        self.given: list[tuple[int, int, int]] = []
        self.positions = Positions()

    def execute(self, plan: StepPlan) -> StepResult:
        ends = plan.counts.cumsum()
        starts = self.positions.starts(plan)
        positions = np.repeat(starts - (ends - plan.counts), plan.counts) + np.arange(plan.counts.sum())
        hidden = None if plan.shown is None else positions[plan.shown].astype(np.float32)
        if plan.embed_places is not None:
            rows = plan.embeds.reshape(len(plan.embed_places), 2).astype(int)
            assert plan.embeds.size <= flight.MAX_EMBEDS and (plan.embed_places >= plan.num_decodes).all()
            self.given += [
                (number, position, row)
                for (number, row), position in zip(
                    rows.tolist(), positions[plan.embed_places].tolist(), strict=True
                )
            ]
        tokens = np.full(int(plan.samples.sum()), 3, np.int32)
        return StepResult(
            plan.step, tokens, -1, NOTHING, np.zeros(0, np.int32), NOTHING, [], 0.0, hidden=hidden
        )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_pages", "seed"), [(60, 1), (11, 2), (11, 3), (14, 4)])
def test_each_token_brings_its_own(depth: int, num_pages: int, seed: int) -> None:
    random = Random(seed)
    scheduler, rank, plans = make(num_pages), Rank(), []
    prompts = [[random.randrange(3) for _ in range(random.randint(1, 30))] for _ in range(40)]
    kinds = [random.choice(KINDS) for _ in prompts]
    embedded = [random.random() < 0.3 for _ in prompts]
    ids = [
        scheduler.add(request(f"r{i}", prompt, i, kinds[i], is_embedded=embedded[i]))[0]
        for i, prompt in enumerate(prompts)
    ]
    reported: dict[int, list[list[int]]] = {sequence_id: [] for sequence_id in ids}
    deaths = 2
    while plans or scheduler.roster.live:
        while len(plans) < depth and (plan := scheduler.plan()) is not None:
            plans.append(plan)
        if deaths and random.random() < 0.02:
            deaths -= 1
            scheduler.lose_ranks()
            scheduler.resume(num_pages)
            plans.clear()
            continue
        step = scheduler.apply(rank.execute(plans.pop(0)))
        for sequence_id in step.sequence_ids:
            states = step.hidden.get(sequence_id)
            reported[sequence_id].append([] if states is None else states.ravel().astype(int).tolist())
    for i, prompt in enumerate(prompts):
        later = [[position] for position in range(len(prompt), len(prompt) + NEW_TOKENS - 1)]
        first = {"all": list(range(len(prompt))), "last": [len(prompt) - 1]}
        assert reported[ids[i]] == ([[]] * NEW_TOKENS if kinds[i] is None else [first[kinds[i]], *later])
        given = {position for number, position, _ in rank.given if number == i}
        assert given == (set(range(len(prompt))) if embedded[i] else set())
    assert all(position == row for _, position, row in rank.given)
    assert num_pages > 20 or scheduler.totals.preemptions
    assert not scheduler.planner.hidden._collected and not scheduler.roster.num_shown


def test_a_step_brings_so_many_embeddings() -> None:
    """Of wide rows few in a step, which takes more steps."""
    scheduler, counts = make(60), []
    width = flight.MAX_EMBEDS // 5
    for name, length in (("a", 12), ("b", 3)):
        rows = np.broadcast_to(np.arange(length, dtype=np.float32)[:, None], (length, width))
        scheduler.add(
            Request(
                id=name,
                prompt_ids=[1] * length,
                params=SamplingParams(max_new_tokens=1),
                seed=1,
                arrival_s=0,
                embeds=rows,
                namespace=name,
            )
        )
    while scheduler.roster.live:
        plan = scheduler.plan()
        assert plan is not None
        counts.append(0 if plan.embed_places is None else len(plan.embed_places))
        scheduler.apply(
            StepResult(
                plan.step,
                np.full(int(plan.samples.sum()), 3, np.int32),
                -1,
                NOTHING,
                np.zeros(0, np.int32),
                NOTHING,
                [],
                0.0,
            )
        )
    assert sum(counts) == 15 and max(counts) == 5
