"""Pause, go on, flush: no token changes, whichever sequences wait; the cache is emptied only when unused."""

from random import Random

import pytest

from runtime.messages.requests import FinishReason
from runtime.messages.scheduler import StepTokens
from runtime.scheduling.pausing import flush, pause, unpause
from tests.scheduling.world import World


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pauses_at_random_moments_change_no_token(depth: int, seed: int) -> None:
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
    flushed = pauses = 0
    for _ in range(25):
        for _ in range(random.randrange(1, 6)):
            world.submit()
            if world.results and random.random() < 0.7:
                world.receive()
        pause(world.scheduler, random.choice(["retract", "in_place"]))
        assert not world.submit()
        late = world.add([9, 9, random.randrange(8)], max_new_tokens=3)
        assert not world.submit(), "a newcomer waits as well"
        ids += late
        while world.results and random.random() < 0.8:
            world.receive()
        if (freed := flush(world.scheduler)) is not None:
            assert not world.scheduler.roster.num_running and not world.results
            flushed += freed > 0
        if not world.results and random.random() < 0.2:
            world.die()  # ranks may die meanwhile
        world.check_pages()
        pauses += bool(world.scheduler.roster.live)
        unpause(world.scheduler)
    world.run()
    assert pauses and (flushed or not world.config.cache.shares)
    assert [world.seen[i] for i in ids] == [world.expected(i) for i in ids]


def test_abort_ends_all_and_newcomers_wait() -> None:
    world = World()
    ids = [
        *world.add([1, 2, 3], max_new_tokens=50, ignore_eos=True, n=2),
        *world.add([4], max_new_tokens=50, ignore_eos=True),
    ]
    for _ in range(3):
        world.submit()
        world.receive()
    pause(world.scheduler, "abort")
    new = world.add([5], max_new_tokens=2, ignore_eos=True)
    assert not world.submit()
    while world.results:
        world.receive()
    world.take(StepTokens([], [], world.scheduler.take_ended(), {}, {}))
    assert [world.reasons[i] for i in ids] == [FinishReason.ABORT] * 3 and not world.seen[new[0]]
    unpause(world.scheduler)
    world.run()
    assert len(world.seen[new[0]]) == 2


def test_time_goes_on_in_a_pause() -> None:
    world = World()
    world.add([1], max_new_tokens=50, ignore_eos=True, timeout_s=5)
    world.submit()
    world.receive()
    pause(world.scheduler, "retract")
    world.add([1], queue_timeout_s=2)
    refused = world.scheduler.expire(3.0)
    assert [refusal.request_id for refusal, _ in refused] == ["r1"] and world.scheduler.timeouts == {
        "queue": 1,
        "total": 0,
    }
    # ends with its token
    assert world.scheduler.expire(6.0) == [] and world.scheduler.timeouts == {"queue": 1, "total": 1}


def test_a_flush_is_refused_while_sequences_run() -> None:
    world = World()
    world.add([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=3, ignore_eos=True)
    world.submit()
    assert flush(world.scheduler) is None
    world.run()
    cached = world.scheduler.cache.num_used
    assert cached and flush(world.scheduler) == cached and not world.scheduler.cache.num_used


def test_copies_to_host_memory_are_no_hindrance() -> None:
    world = World(num_host_pages=9, depth=1)
    world.add([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=1)
    world.submit()
    world.receive()
    assert world.submit() and not world.scheduler.roster.live, "what it left is saved"
    assert flush(world.scheduler) == 2
    world.run()
    assert world.scheduler.cache.num_used == world.scheduler.cache.host.num_used == 0
