"""Which window pages stay: those from which sequences go on."""

import pytest

from runtime.cache.audit import findings
from tests.scheduling.world import World

DOCUMENT = [k % 41 for k in range(40)]


def ask(world: World, own: int, length: int = 30) -> int:
    """-> tokens that a question about the document finds in the cache"""
    before = world.scheduler.totals.cached_tokens
    (i,) = world.add([*DOCUMENT, *[own] * length], max_new_tokens=3, ignore_eos=True)
    world.run()
    assert world.seen[i] == world.expected(i)
    return world.scheduler.totals.cached_tokens - before


def stream(world: World, first: int) -> None:
    """A long prompt that shares no prefix passes through."""
    world.add([first, *[k % 37 for k in range(150)]], max_new_tokens=2, ignore_eos=True)
    world.run()


def test_where_sequences_part_is_learnt() -> None:
    world = World(num_pages=200, page_size=4, chunk=8, window=9, spare_window_pages=8)
    assert ask(world, 1) == 0
    stream(world, 42)
    assert ask(world, 2) == 0, "the document's pages are there, its window is not"
    assert ask(world, 3) == len(DOCUMENT)
    stream(world, 43)
    assert ask(world, 4) == len(DOCUMENT), "what merely passes does not push it out"


def test_what_is_not_used_goes_in_the_end() -> None:
    world = World(num_pages=400, page_size=4, chunk=8, window=9, spare_window_pages=8)
    for own in (1, 2, 3):
        ask(world, own)
    for first in range(20, 30):  # the ends of these are younger
        stream(world, first)
    assert ask(world, 4) == 0


@pytest.mark.parametrize("window", [1, 5, 9])
def test_a_conversation_goes_on_where_it_stopped(window: int) -> None:
    """What was generated is found again, though the window saw only the last of it."""
    world = World(num_pages=200, page_size=4, chunk=8, window=window, spare_window_pages=0)
    (i,) = world.add(DOCUMENT, max_new_tokens=31, ignore_eos=True)
    world.run()
    history = [*DOCUMENT, *world.seen[i], 1, 2, 3]
    world.add(history, max_new_tokens=2, ignore_eos=True)
    world.run()
    assert world.scheduler.totals.cached_tokens == 68  # full pages of the 70 tokens that were computed


def test_room_is_kept_for_prompts_that_are_under_way() -> None:
    """Two long prompts and room for one window: the second waits, and both end."""
    world = World(num_pages=200, page_size=4, chunk=8, window=9, spare_window_pages=0, max_running=4)
    ids = [world.add([k, *range(40)] * 2, max_new_tokens=2, ignore_eos=True)[0] for k in range(4)]
    while world.submit():
        assert len(world.scheduler.roster.extending) <= 1
        world.receive()
    world.run()
    assert all(world.seen[i] == world.expected(i) for i in ids)


def test_the_audit_looks_at_window_pages() -> None:
    world = World(num_pages=200, page_size=4, chunk=8, window=9, spare_window_pages=60)
    world.add(DOCUMENT, max_new_tokens=20, ignore_eos=True)
    for _ in range(12):
        world.submit()
        world.receive()
    cache = world.scheduler.cache
    running = list(world.scheduler.roster.live.values())
    assert cache.window is not None and running[0].window is not None and findings(cache, running).is_clean
    cache.window.pool.allocate(1)
    (words,) = findings(cache, running).messages
    assert words.startswith("window page") and words.endswith("has 0 owners")
    cache.quarantine(set(), set())
    assert findings(cache).is_clean and cache.window.num_available == world.config.cache.window.num_pages - 1
