"""Sequences of a model that pools: they end with a vector, once, and leave nothing behind."""

from random import Random

import numpy as np
import pytest

from runtime.cache.audit import findings
from runtime.cache.kv import CacheConfig
from runtime.messages.requests import FinishReason, Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import StepPlan, StepResult
from runtime.scheduling.admission import Admission
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.scheduling.positions import Positions

NOTHING = np.zeros(0, np.float32)


def make(*, is_whole: bool, num_pages: int = 40, max_running: int = 4) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_running=max_running,
            max_step_tokens=24,
            max_len=24,
            page_size=4,
            num_pages=num_pages,
            eos_ids=(7,),
            pools=True,
            cache=CacheConfig(shares=not is_whole),
            admission=Admission(max_step_tokens=24, has_chunks=not is_whole),
        )
    )


def request(name: str, prompt: list[int]) -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(), seed=1, arrival_s=0)


def execute(plan: StepPlan, starts: np.ndarray) -> StepResult:
    """The vector of a row is its slot and its length."""
    rows = np.flatnonzero(plan.samples)
    vectors = np.stack([plan.slots[rows], (starts + plan.counts)[rows]], axis=1).astype(np.float32).ravel()
    return StepResult(
        plan.step,
        np.zeros(0, np.int32),
        -1,
        NOTHING,
        np.zeros(0, np.int32),
        NOTHING,
        [],
        0.0,
        vectors=vectors,
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_whole", [True, False])
def test_each_ends_once_with_its_own(is_whole: bool, depth: int) -> None:
    random = Random(5)
    scheduler, seen, plans = make(is_whole=is_whole), {}, []
    prompts = {f"r{i}": [random.randrange(3) for _ in range(random.randint(1, 24))] for i in range(60)}
    names = {scheduler.add(request(name, prompt))[0]: name for name, prompt in prompts.items()}
    aborted = {"r3", "r30", "r59"}
    for name in aborted - {"r3"}:
        scheduler.abort(name)
    died, positions = False, Positions()
    while plans or scheduler.roster.live:
        while len(plans) < depth and (plan := scheduler.plan()) is not None:
            assert not plan.num_decodes
            starts = positions.starts(plan)
            assert not is_whole or (plan.samples.all() and not starts.any()), "a text in pieces"
            plans.append((plan, starts))
        if not died and len(seen) > 20:
            died = True
            scheduler.lose_ranks()
            scheduler.resume(40)
            plans.clear()
            continue
        if len(seen) == 0:
            scheduler.abort("r3")  # with its step in flight
        step = scheduler.apply(execute(*plans.pop(0)))
        assert not step.token_ids
        for end in step.ended:
            assert names[end.sequence_id] not in seen
            seen[names[end.sequence_id]] = (end.reason, step.vectors.get(end.sequence_id))
    assert died and seen.keys() == prompts.keys()
    for name, (reason, vector) in seen.items():
        assert reason is (FinishReason.ABORT if name in aborted else FinishReason.STOP)
        assert name in aborted or int(vector[1]) == len(prompts[name])
    assert not scheduler.roster.num_running
    assert findings(scheduler.cache).messages == []


def test_texts_share_a_step() -> None:
    scheduler = make(is_whole=True)
    for i in range(3):
        scheduler.add(request(str(i), [i] * 8))
    plan = scheduler.plan()
    assert plan is not None and plan.counts.tolist() == [8, 8, 8]
