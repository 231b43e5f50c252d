"""Steps of different sequences in flight: no token differs, and stages are busy at a time."""

from itertools import product

import numpy as np
import pytest

from runtime.devices.null.stage_times import StageTimes
from runtime.messages.steps import StepPlan
from runtime.scheduling.micro_batches import MicroBatches
from tests.scheduling.guessing import Guesser
from tests.scheduling.world import World


def pipelined(count: int, more: int = 1, most: int | None = None, **options: object) -> World:
    return World(depth=count + more, micro_batches=MicroBatches(count, most), **options)


@pytest.mark.parametrize(("count", "more", "num_pages"), list(product((2, 3, 4), (0, 1), (12, 200))), ids=str)
def test_answers_are_those_of_one_stage(count: int, more: int, num_pages: int) -> None:
    """Where pages are scarce sequences are preempted, with tokens in flight."""
    world = pipelined(count, more, num_pages=num_pages, max_running=6)
    for head in range(9):
        world.add([head, *range(head % 5)], max_new_tokens=20)
    world.run()
    assert all(tokens == world.expected(i) for i, tokens in world.seen.items())
    assert num_pages > 12 or world.scheduler.totals.preemptions


@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
def test_drafts(has_trees: bool) -> None:
    world = pipelined(2, num_pages=200, drafter=Guesser(5, 0.7, has_trees=has_trees), longest_run=6)
    for head in range(4):
        world.add([head, 1, 2, 3], max_new_tokens=40, ignore_eos=True)
    world.run()
    assert all(tokens == world.expected(i) for i, tokens in world.seen.items())
    assert world.scheduler.totals.accepted_drafts > 20


def test_ranks_die_with_steps_in_flight() -> None:
    world = pipelined(3, num_pages=100, max_running=6)
    for head in range(6):
        world.add([head, 1, 2], max_new_tokens=30, ignore_eos=True)
    for deaths in range(3):
        for _ in range(10 + deaths):
            while world.submit():
                pass
            world.receive()
        assert len(world.results) >= 2
        world.die()
    world.run()
    assert all(tokens == world.expected(i) for i, tokens in world.seen.items())


def in_flight(world: World) -> list[set[int]]:
    """Sequences of the steps in flight."""
    return [{sequence.id for sequence in flight.computed} for flight in world.scheduler.flights]


def test_steps_in_flight_have_different_sequences() -> None:
    """A sequence takes part again when as many steps were planned since as there are stages."""
    world = pipelined(3, num_pages=200, max_running=12)
    for head in range(12):
        world.add([head, 1], max_new_tokens=60, ignore_eos=True)
    for turn in range(40):
        while world.submit():
            pass
        if turn > 6:
            first, second, third, again = in_flight(world)
            assert not (first & second or first & third or second & third) and again == first
            assert [len(ids) for ids in (first, second, third)] == [4, 4, 4]
        world.receive()


def test_a_single_sequence_waits_for_its_token() -> None:
    world = pipelined(4, num_pages=50)
    world.add([1, 2], max_new_tokens=5, ignore_eos=True)
    while world.submit():
        assert world.scheduler.num_in_flight == 1 and not world.submit()
        world.receive()
    assert world.scheduler.totals.steps == 5


def test_chunks_of_a_prompt_are_in_flight_together() -> None:
    world = pipelined(3, num_pages=50, chunk=4)
    world.add(list(range(16)), max_new_tokens=4, ignore_eos=True)
    while world.submit():
        pass
    assert len(in_flight(world)) == 4 and len(set(map(frozenset, in_flight(world)))) == 1
    world.run()


@pytest.mark.parametrize(("most", "sizes"), [(None, 5), (3, 3), (9, 5)])
def test_a_micro_batch_has_an_even_share_at_most(most: int | None, sizes: int) -> None:
    world = pipelined(2, most=most, num_pages=200, max_running=10)
    for head in range(10):
        world.add([head, 1], max_new_tokens=60, ignore_eos=True)
    largest = 0
    for turn in range(30):
        while world.submit():
            pass
        if turn > 5:
            largest = max(largest, *map(len, in_flight(world)))
        world.receive()
    assert largest == sizes


def decode(slots: list[int], step: int = 1) -> StepPlan:
    rows = np.array(slots, np.int32)
    counts, samples = np.ones(len(slots), np.int32), np.ones(len(slots), np.uint8)
    return StepPlan(step=step, num_decodes=len(slots), slots=rows, counts=counts, samples=samples)


def test_times_of_stages() -> None:
    times = StageTimes(4, 8)
    assert times.add(decode([0]), 10.0, 4.0) == 14.0
    assert times.add(decode([1]), 10.0, 4.0) == 15.0, "a stage behind the first one"
    assert times.add(decode([0]), 10.0, 4.0) == 18.0, "its last token was not known before"
    assert times.add(decode([2]), 30.0, 4.0) == 34.0
    one = StageTimes(1, 8)
    assert [one.add(decode([slot]), 1.0, 2.0) for slot in (0, 1, 0)] == [3.0, 5.0, 7.0]
