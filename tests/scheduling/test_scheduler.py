import sys
from types import FrameType

import pytest

from runtime.messages.requests import FinishReason
from runtime.scheduling.waiting import OrderConfig
from tests.scheduling.world import World


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("shares", [True, False])
def test_output_does_not_depend_on_the_schedule(depth: int, page_size: int, chunk: int, shares: bool) -> None:
    world = World(depth=depth, page_size=page_size, num_pages=1 + 48 // page_size, chunk=chunk, shares=shares)
    ids = [
        i
        for k in range(7)
        for i in world.add(
            [1, 2, 3, 4, 5, 6, k % 3, 8] * (1 + k % 2),
            max_new_tokens=10 + k,
            ignore_eos=k % 2 == 0,
            n=1 + k % 2,
        )
    ]
    world.run()
    for i in ids:
        assert world.seen[i] == world.expected(i)


def test_frames_that_are_kept_hold_no_tokens() -> None:
    """A profiler or a traceback keeps frames alive, and with them their variables: a view of a sequence's
    tokens among these would make the next token a BufferError."""
    frames: list[FrameType] = []
    world = World(
        page_size=2, num_pages=30, max_running=2, num_host_pages=20, order=OrderConfig(policy="lpm")
    )
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)
    try:
        ids = [world.add([1, 2, 3, k % 2, 4, 5], max_new_tokens=6, ignore_eos=True)[0] for k in range(6)]
        world.run()
    finally:
        sys.setprofile(None)
    names = {frame.f_code.co_name for frame in frames}
    assert {"longest_prefix", "probe", "match", "missing", "admit"} <= names
    assert [world.seen[i] for i in ids] == [world.expected(i) for i in ids]


def test_preemption_loses_nothing() -> None:
    world = World(num_pages=9, page_size=4, max_running=4, conservativeness=0.0)
    ids = [world.add([k, 1, 2, 3, 4], max_new_tokens=20, ignore_eos=True)[0] for k in range(4)]
    world.run()
    assert world.scheduler.totals.preemptions > 0
    assert [world.seen[i] for i in ids] == [world.expected(i) for i in ids]


def test_a_second_request_finds_the_prefix() -> None:
    world = World(num_pages=40)
    world.add(list(range(20, 40)), max_new_tokens=2)
    world.run()
    (second,) = world.add(list(range(20, 40)), max_new_tokens=2)
    world.run()
    # the last page is not full of prompt tokens but one must be computed
    assert world.scheduler.totals.cached_tokens == 16
    assert world.seen[second] == world.expected(second)


def test_siblings_share_their_prompt() -> None:
    world = World(num_pages=40, chunk=8)
    ids = world.add(list(range(20, 37)), n=4, max_new_tokens=3)
    world.run()
    assert world.scheduler.totals.cached_tokens == 3 * 16
    assert all(world.seen[i] == world.expected(i) for i in ids)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("window", [1, 2, 6, 13])
def test_windows_of_few_pages(depth: int, page_size: int, chunk: int, window: int) -> None:
    """As many window pages as one sequence needs, or some more: no one is in the way of another for ever."""
    for spare in (0, 5):
        world = World(
            depth=depth,
            page_size=page_size,
            num_pages=1 + 160 // page_size,
            chunk=chunk,
            window=window,
            spare_window_pages=spare,
            conservativeness=0.0,
        )
        ids = [
            i
            for k in range(7)
            for i in world.add(
                [1, 2, 3, 4, 5, 6, k % 3, 8] * (1 + 3 * (k % 2)),
                max_new_tokens=20 + k,
                ignore_eos=k % 2 == 0,
                n=1 + k % 2,
            )
        ]
        world.run()
        assert [world.seen[i] for i in ids] == [world.expected(i) for i in ids]


def test_a_prefix_ends_where_its_window_does() -> None:
    """The tree keeps 10 pages of a prompt, but window pages of what was seen last only."""
    world = World(num_pages=60, page_size=4, chunk=8, window=8, spare_window_pages=4)
    prompt = [k % 40 for k in range(43)]
    world.add(prompt, max_new_tokens=2, ignore_eos=True)
    world.run()
    (again,) = world.add(prompt, max_new_tokens=2, ignore_eos=True)
    world.run()
    assert world.scheduler.totals.cached_tokens == 40  # its end is there
    (branch,) = world.add([*prompt[:20], *range(30)], max_new_tokens=2, ignore_eos=True)
    world.run()
    assert world.scheduler.totals.cached_tokens == 40  # 5 pages match, without a window to go on from
    assert all(world.seen[i] == world.expected(i) for i in (again, branch))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_prompt_logprobs_cover_the_prompt(chunk: int) -> None:
    world = World(num_pages=40, chunk=chunk)
    prompt = [5, 6, 8, 9, 10, 11, 12]
    world.add(prompt, max_new_tokens=2, ignore_eos=True)
    world.run()
    (i,) = world.add(prompt, max_new_tokens=2, prompt_logprobs=0, ignore_eos=True)
    world.run()
    assert [t.token_id for t in world.prompts[i]] == prompt
    assert [t.logprob for t in world.prompts[i]] == [None, *(-float(t) for t in prompt[1:])]


def test_reasons_and_matches() -> None:
    world = World(num_pages=60)
    (length,) = world.add([1, 2], max_new_tokens=3, ignore_eos=True)
    (stop,) = world.add([1, 2], stop_token_ids=tuple(range(0, 50)))
    world.run()
    assert world.reasons == {length: FinishReason.LENGTH, stop: FinishReason.STOP}
    assert len(world.seen[length]) == 3 and len(world.seen[stop]) == 1
