"""The prefill delayer: when it lets newcomers in, and what that does to steps."""

import pytest

from runtime.scheduling.admission import Admission
from runtime.scheduling.delayer import Delayer, Replica
from tests.scheduling.world import World

NOTHING, SOME, FULL = Replica(False, False, 0.5), Replica(True, False, 0.5), Replica(True, True, 0.5)


@pytest.mark.parametrize(
    ("replicas", "watermark", "reason"),
    [
        ([FULL], None, "full"),
        ([SOME], None, None),
        ([SOME], 0.4, None),
        ([SOME], 0.6, "watermark"),
        ([SOME, SOME], None, "full"),
        ([SOME, NOTHING], None, None),
        ([FULL, NOTHING], None, None),
        ([NOTHING, SOME], 0.6, "watermark"),
    ],
)
def test_when_newcomers_are_let_in(
    replicas: list[Replica], watermark: float | None, reason: str | None
) -> None:
    reported: list[str] = []
    delayer = Delayer(3, watermark, on_admit=lambda reason, steps, seconds: reported.append(reason))
    assert delayer.admits(replicas) == (reason is not None) and reported == ([reason] if reason else [])


def test_no_request_is_held_back_for_longer_than_the_limit() -> None:
    now_s = 0.0
    reported: list[tuple[str, int, float]] = []
    delayer = Delayer(3, None, lambda: now_s, lambda *what: reported.append(what))
    for _ in range(4):
        now_s += 1.0
        delayer.admits([SOME])
    delayer.admits([FULL])
    assert reported == [("limit", 3, 3.0), ("full", 0, 0.0)]


def trickle(delay_steps: int, **more: object) -> tuple[World, int, list[int]]:
    """Four streams decode while short prompts come, one every second step. -> world, steps with prompts,
    ids"""
    admission = Admission(max_step_tokens=64, delay_steps=delay_steps, **more)
    world = World(num_pages=400, page_size=4, max_running=16, chunk=64, admission=admission)
    ids = [i for k in range(4) for i in world.add([1, 2, k], max_new_tokens=150, ignore_eos=True)]
    prefills = 0
    for step in range(120):
        if step % 2 == 0 and step > 4:
            ids += world.add([step % 50] * 8, max_new_tokens=2, ignore_eos=True)
        plan = world.scheduler.plan()
        if plan is not None:
            prefills += len(plan.slots) > plan.num_decodes
            world.results.append(world.rank.execute(plan))
        if len(world.results) > 1 or plan is None:
            world.receive()
    return world, prefills, ids


def test_prompts_share_steps_and_no_token_changes() -> None:
    plain, often, ids = trickle(0)
    delayed, seldom, same = trickle(20)
    assert often > 50 and seldom < often / 5
    for world, all_ids in ((plain, ids), (delayed, same)):
        world.run()
        assert [world.seen[i] for i in all_ids] == [world.expected(i) for i in all_ids]


def test_with_room_no_request_waits() -> None:
    assert trickle(20, delay_watermark=0.9)[1] > 50


def test_alone_no_request_waits() -> None:
    world = World(admission=Admission(max_step_tokens=16, delay_steps=1000))
    world.add([1, 2, 3], max_new_tokens=2, ignore_eos=True)
    assert world.submit()
    world.add([1, 2, 4], max_new_tokens=2, ignore_eos=True)
    world.run()
