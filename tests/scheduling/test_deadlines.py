from math import inf

import pytest

from runtime.messages.requests import FinishReason
from runtime.messages.scheduler import Refused
from runtime.scheduling.deadlines import Limit
from tests.scheduling.world import World


def expire(world: World, now_s: float) -> list[Refused]:
    refused = world.scheduler.expire(now_s)
    for _, ids in refused:
        world.quiet.update(ids)
    return [refusal for refusal, _ in refused]


@pytest.mark.parametrize(
    ("limit", "own", "at_s"),
    [
        (Limit(), {}, inf),
        (Limit(queue_s=5), {}, 5),
        (Limit(queue_s=5), {"queue_timeout_s": 2}, 2),
        (Limit(queue_s=5), {"queue_timeout_s": 9}, 5),
        (Limit(), {"timeout_s": 3}, 3),
        (Limit(total_s=3, queue_s=5), {}, 3),
        (Limit(total_s=5, queue_s=3), {}, 3),
    ],
)
def test_the_shorter_limit_holds(limit: Limit, own: dict[str, float], at_s: float) -> None:
    world = World(limit=limit)
    world.add([1, 2], max_new_tokens=3, **own)
    assert world.scheduler.deadlines.next_s == at_s
    if at_s < inf:
        assert not expire(world, at_s - 0.001)
        (refusal,) = expire(world, at_s)
        assert refusal.status == 503 and not world.scheduler.roster.live
    world.run()


def test_who_runs_has_left_the_queue() -> None:
    world = World(limit=Limit(queue_s=1), max_running=1)
    (first,) = world.add([1, 2], max_new_tokens=5, ignore_eos=True)
    (second,) = world.add([1, 3], max_new_tokens=5, ignore_eos=True)
    world.submit()
    assert [refusal.request_id for refusal in expire(world, 2)] == [world.requests[second].id]
    world.run()
    assert world.seen[first] == world.expected(first) and not world.seen[second]
    assert world.scheduler.timeouts == {"queue": 1, "total": 0}


def test_who_has_tokens_keeps_them() -> None:
    world = World(limit=Limit(total_s=1))
    (first,) = world.add([1, 2], max_new_tokens=50, ignore_eos=True)
    for _ in range(3):
        world.submit()
        world.receive()
    assert expire(world, 2) == []
    world.run()
    assert world.reasons[first] is FinishReason.ABORT
    assert world.seen[first] == world.expected(first)[:3]


def test_a_request_that_has_ended_is_left_alone() -> None:
    world = World(limit=Limit(total_s=1, queue_s=1))
    world.add([1, 2], max_new_tokens=2)
    world.run()
    assert not expire(world, 2) and world.scheduler.timeouts == {"queue": 0, "total": 0}
