"""Ranks die, requests live: the scheduler against the oracle rank."""

from random import Random

import pytest

from runtime.messages.requests import FinishReason
from runtime.messages.steps import StepPlan
from tests.scheduling.answers import VOCAB
from tests.scheduling.world import World

POISON = VOCAB  # no answer contains it


def is_deadly(plan: StepPlan) -> bool:
    return POISON in plan.token_ids.tolist()


def run_with_poison(world: World) -> int:
    """Steps run until nothing is left; ranks die at a step that computes a prompt with the poison. ->
    deaths"""
    deaths = 0
    for _ in range(10_000):
        plan = world.scheduler.plan() if len(world.results) < world.depth else None
        if plan is None:
            if not world.results:
                break
            world.receive()
        elif is_deadly(plan):
            world.die()
            deaths += 1
        else:
            world.results.append(world.rank.execute(plan))
    world.check_idle()
    return deaths


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_deaths_at_random_moments_change_no_token(depth: int, seed: int) -> None:
    random = Random(seed)
    world = World(
        depth=depth,
        page_size=random.choice([1, 3, 4]),
        num_pages=60,
        chunk=random.choice([2, 7, 64]),
        shares=seed % 3 != 0,
    )
    ids = [
        i
        for k in range(6)
        for i in world.add(
            [1, 2, 3, 4, 5, k] * (1 + k % 3), max_new_tokens=12, ignore_eos=k % 2 == 0, n=1 + k % 2
        )
    ]
    recovered = 0
    for _ in range(40):
        for _ in range(random.randrange(1, 9)):
            world.submit()
            if world.results and random.random() < 0.7:
                world.receive()
        if not world.scheduler.roster.decoding:
            continue
        while world.results and random.random() < 0.5:
            world.receive()
        if not world.scheduler.recovery.marks:  # else a second accident would look like guilt
            recovered += world.die().num_requests
            assert not world.scheduler.num_in_flight and not world.scheduler.roster.num_running
            world.check_pages()
    world.run()
    assert recovered and not world.failed
    assert [world.seen[i] for i in ids] == [world.expected(i) for i in ids]


def test_who_ran_goes_first_and_oldest_first() -> None:
    world = World(num_pages=60, max_running=2, page_size=4)
    ids = [world.add([k, 1, 2], max_new_tokens=9, ignore_eos=True)[0] for k in range(4)]
    world.submit()
    world.receive()
    world.submit()
    assert world.die().num_requests == 2
    waiting = world.scheduler.roster.waiting
    assert [entry[3].id for lane in waiting._lanes.values() for entry in lane.entries] == ids
    assert all(
        s.in_flight == s.computed_len == 0 and s.slot == -1 for s in world.scheduler.roster.live.values()
    )
    assert len(world.scheduler.roster.live[ids[0]].tokens) == 4, "its first token is known and stays"


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_prompt_logprobs_start_over_or_are_not_given_twice(steps: int) -> None:
    world = World(chunk=3, num_pages=40)
    prompt = [5, 6, 8, 9, 10, 11, 12, 13]
    (i,) = world.add(prompt, max_new_tokens=6, prompt_logprobs=0, ignore_eos=True)
    for _ in range(steps):
        world.submit()
        if steps % 2:
            world.receive()
    given = dict(world.prompts)
    world.prompts.clear()
    world.die()
    world.run()
    assert bool(given) != bool(world.prompts), "given once"
    prompts = (given or world.prompts)[i]
    assert [t.logprob for t in prompts] == [None, *(-float(t) for t in prompt[1:])]
    assert world.seen[i] == world.expected(i)


def test_an_abort_between_the_generations_ends_a_request_once() -> None:
    world = World(num_pages=40)
    first, second = (
        world.add([1, 2, 3], max_new_tokens=9)[0],
        world.add([4, 5, 6], max_new_tokens=9, ignore_eos=True)[0],
    )
    world.submit()
    world.scheduler.lose_ranks()
    world.scheduler.abort("r0")
    world.results.clear()
    world.rank.step = world.scheduler.totals.steps
    world.run()
    assert world.reasons == {first: FinishReason.ABORT, second: FinishReason.LENGTH}
    assert world.seen[second] == world.expected(second)


def test_fewer_pages_end_what_has_no_room() -> None:
    world = World(num_pages=20, page_size=4, max_running=2)
    long = world.add(list(range(20, 40)), max_new_tokens=40, ignore_eos=True)[0]
    short = world.add([1, 2, 3], max_new_tokens=8, ignore_eos=True)[0]
    huge = world.add(list(range(10, 45)), max_new_tokens=4)[0]
    while len(world.seen[long]) < 6:
        world.submit()
        world.receive()
    world.die(num_pages=8)  # 28 tokens
    world.run()
    assert world.failed == {huge} and world.reasons[long] is FinishReason.LENGTH
    assert len(world.seen[long]) == 8 and world.seen[long] == world.expected(long)
    assert world.seen[short] == world.expected(short)
    longest = world.add([1, 2], ignore_eos=True)[0]
    world.die(num_pages=30)
    world.run()
    assert len(world.seen[longest]) == 29 * 4 - 2, "and more pages let more of it in"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("seed", range(8))
def test_a_poisoned_request_fails_alone(depth: int, chunk: int, seed: int) -> None:
    random = Random(seed)
    world = World(depth=depth, chunk=chunk, num_pages=200, max_running=8)
    guilty = set(random.sample(range(10), seed % 3))
    ids = {
        k: world.add(
            [k + 1, 2, 3, POISON if k in guilty else 4, 5],
            max_new_tokens=8 + k,
            n=1 + (k == 3),
            ignore_eos=True,
        )
        for k in range(10)
    }
    deaths = run_with_poison(world)
    assert world.failed == {i for k in guilty for i in ids[k]}
    assert deaths <= len(guilty) * (2 + 4)
    for k, sequence_ids in ids.items():
        if k not in guilty:
            assert all(world.seen[i] == world.expected(i) for i in sequence_ids)
            assert all(world.reasons[i] is FinishReason.LENGTH for i in sequence_ids)


def test_poison_that_comes_late_is_found_at_its_token() -> None:
    """The deadly token is one that the request itself generates, in a decode among others."""
    world = World(num_pages=200, max_running=8)
    ids = [world.add([k, 1, 2], max_new_tokens=30, ignore_eos=True)[0] for k in range(6)]
    deaths = 0
    for _ in range(10_000):
        victim = world.scheduler.roster.live.get(ids[2])
        plan = world.scheduler.plan() if len(world.results) < world.depth else None
        if plan is None:
            if not world.results:
                break
            world.receive()
        elif victim is not None and victim.slot in plan.slots and victim.computed_len > 12:
            world.die()
            deaths += 1
        else:
            world.results.append(world.rank.execute(plan))
    world.check_idle()
    assert world.failed == {ids[2]} and deaths <= 2 + 3
    assert all(world.seen[i] == world.expected(i) for i in ids if i != ids[2])
    assert (
        world.seen[ids[2]] == world.expected(ids[2])[: len(world.seen[ids[2]])]
        and len(world.seen[ids[2]]) >= 9
    )


def test_others_wait_while_a_request_is_on_trial() -> None:
    world = World(num_pages=60)
    for k in range(4):
        world.add([k, 1, 2], max_new_tokens=5, ignore_eos=True)
    for _ in range(2):
        world.submit()
        world.die()
    world.add([9, 9], max_new_tokens=5, ignore_eos=True)  # comes during the trial
    running: list[set[str]] = []
    while world.submit():
        running.append({s.request.id for s in world.scheduler.flights[-1].computed})
        if world.scheduler.roster.waiting.admits_only:
            assert running[-1] <= world.scheduler.roster.waiting.admits_only
            assert {
                s.request.id for f in world.scheduler.flights for s in f.computed
            } <= world.scheduler.roster.waiting.admits_only
        world.receive()
    assert running[0] == {"r0", "r1"} and running[-1] >= {"r4"}
    world.check_idle()
    assert all(world.seen[i] == world.expected(i) for i in world.seen)
