"""Which states stay, and who goes on from them. That each token starts from the right one is what the oracle
watches over."""

import numpy as np
import pytest

from runtime.cache.audit import findings
from runtime.cache.node import Node
from runtime.messages.steps import Samples, StateCopies
from runtime.scheduling.waiting import OrderConfig
from tests.scheduling.guessing import Guesser
from tests.scheduling.world import World

DOCUMENT = [k % 41 for k in range(40)]


def ask(world: World, *tokens: int, new: int = 3) -> tuple[int, list[int]]:
    """-> how many of them were found in the cache, and the answer"""
    before = world.scheduler.totals.cached_tokens
    (i,) = world.add(list(tokens), max_new_tokens=new, ignore_eos=True)
    world.run()
    assert world.seen[i] == world.expected(i)
    return world.scheduler.totals.cached_tokens - before, world.seen[i]


@pytest.mark.parametrize("num_states", [1, 2, 20])
@pytest.mark.parametrize("chunk", [3, 8, 10, 100])
def test_a_prompt_is_found_again(num_states: int, chunk: int) -> None:
    world = World(num_pages=100, chunk=chunk, num_states=num_states)
    assert ask(world, *DOCUMENT, 1, 2, 3)[0] == 0
    assert ask(world, *DOCUMENT, 1, 2, 3)[0] == (40 if num_states > 1 else 0), "one slot is for who runs"
    assert ask(world, *DOCUMENT, 1, 2, 3)[0] == (40 if num_states > 1 else 0)


def test_where_sequences_part_is_learnt() -> None:
    world = World(num_pages=200, chunk=100, num_states=8)
    assert ask(world, *DOCUMENT, *[1] * 20)[0] == 0
    assert ask(world, *DOCUMENT, *[2] * 20)[0] == 0, "the document's pages are there, its state is not"
    assert ask(world, *DOCUMENT, *[3] * 20)[0] == len(DOCUMENT)
    assert ask(world, *DOCUMENT, *[3] * 20)[0] == len(DOCUMENT) + 16


def test_siblings_share_the_state_of_their_prompt() -> None:
    world = World(num_pages=60, num_states=8)
    ids = world.add(DOCUMENT, n=4, max_new_tokens=3, ignore_eos=True)
    world.run()
    assert world.scheduler.totals.cached_tokens == 3 * 36
    assert all(world.seen[i] == world.expected(i) for i in ids)


@pytest.mark.parametrize("interval,found", [(0, 40), (1, 68), (2, 64), (5, 60)])
def test_a_conversation_goes_on_from_the_last_state(interval: int, found: int) -> None:
    """Its full pages of generated tokens end at 68; without an interval only prompts leave states."""
    world = World(num_pages=200, num_states=8, interval=interval)
    _, answer = ask(world, *DOCUMENT, 1, new=30)
    assert ask(world, *DOCUMENT, 1, *answer, 1, 2, 3)[0] == found


def test_a_sequence_leaves_its_state_where_it_stopped() -> None:
    world = World(num_pages=100, page_size=1, num_states=8)
    _, answer = ask(world, *DOCUMENT, new=10)
    assert ask(world, *DOCUMENT, *answer, 1)[0] == 49


@pytest.mark.parametrize("wait", range(9))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_slot_goes_to_a_newcomer(wait: int, depth: int) -> None:
    """Also in the very step that would have kept a state there."""
    world = World(num_pages=40, depth=depth, num_states=2, interval=1)
    (first,) = world.add([1, 2, 3, 4, 5], max_new_tokens=20, ignore_eos=True)
    for _ in range(6 + wait):
        world.submit()
        world.receive()
    assert world.scheduler.roster.live[first].state.snapshot
    (second,) = world.add([9, 9, 9], max_new_tokens=3, ignore_eos=True)
    world.submit()
    assert world.scheduler.roster.num_running == 2
    world.run()
    assert all(world.seen[i] == world.expected(i) for i in (first, second))


def test_what_prompts_merely_pass_goes_first() -> None:
    world = World(num_pages=400, chunk=8, num_states=4)
    ask(world, *DOCUMENT, 1)
    for first in (50, 51):
        ask(world, *(k % 37 for k in range(first, first + 121)))
    assert ask(world, *DOCUMENT, 1)[0] == 40


def test_more_sequences_than_states() -> None:
    """Those that find no slot wait, second slots are given up for newcomers, and all get their tokens."""
    for num_states in (1, 2, 3):
        world = World(num_pages=100, num_states=num_states, interval=1, conservativeness=0.0)
        ids = [world.add([k, *DOCUMENT[:9]], max_new_tokens=12, ignore_eos=True)[0] for k in range(6)]
        most = 0
        while world.submit():
            most = max(most, world.scheduler.roster.num_running)
            world.receive()
        world.run()
        assert most == num_states
        assert all(world.seen[i] == world.expected(i) for i in ids)


@pytest.mark.parametrize("interval,found", [(0, 4), (1, 16), (2, 16), (3, 12)])
def test_who_gives_way_goes_on_from_its_last_state(interval: int, found: int) -> None:
    world = World(
        num_pages=40,
        max_running=1,
        num_states=4,
        interval=interval,
        order=OrderConfig(has_priorities=True, preemption_threshold=1),
    )
    (low,) = world.add([1, 2, 3, 4, 5], max_new_tokens=30, ignore_eos=True)
    for _ in range(14):
        world.submit()
        world.receive()
    (high,) = world.add([9, 9, 9], max_new_tokens=3, ignore_eos=True, priority=5)
    sequence, starts = world.scheduler.roster.live[low], set()
    while world.submit():
        starts.add(sequence.cached_len)
        world.receive()
    world.run()
    assert starts == {0, found} and all(world.seen[i] == world.expected(i) for i in (low, high))


def test_plans_say_nothing_of_states_while_nothing_changes() -> None:
    world = World(num_pages=60, num_states=4, interval=2)
    world.add([1, 2, 3, 4, 5], max_new_tokens=20, ignore_eos=True)
    page_copies: list[StateCopies | None] = []
    while (plan := world.scheduler.plan()) is not None:
        page_copies.append(plan.states)
        world.results.append(world.rank.execute(plan))
        world.receive()
    copied = {
        step: [np.asarray(getattr(copies, name)).tolist() for name in copies.__struct_fields__[:7]]
        for step, copies in enumerate(page_copies)
        if copies
    }
    own = 1
    # the empty state is loaded, and that of the first page kept
    assert copied[0] == [[0], [own], [0], [own], [own], [2], [-1]]
    assert set(copied) == {0, 4, 12, 20} and copied[4] == copied[12] == copied[20] == [
        [],
        [],
        [],
        [],
        [own],
        [3],
        [-1],
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("luck", "least"), [(0.0, 40), (0.6, 40), (1.0, 56)])
def test_a_conversation_goes_on_behind_drafts(depth: int, luck: float, least: int) -> None:
    """A row of drafts renews the snapshot that it passes, so that answers are found as without drafts; only
    the last one may still be in flight when the answer ends."""
    drafter = Guesser(5, luck, has_trees=False)
    world = World(num_pages=200, num_states=8, interval=1, depth=depth, drafter=drafter, draft_nodes=20)
    _, answer = ask(world, *DOCUMENT, 1, new=30)
    assert drafter.proposed > 10
    assert ask(world, *DOCUMENT, 1, *answer, 1, 2, 3)[0] >= least


def test_drafts_stay_within_the_memory_for_their_tokens() -> None:
    """Rows of drafts take no more tokens of a step than ranks have memory for, and are never trees."""
    for draft_nodes, has_trees in ((0, False), (3, False), (11, False), (40, True)):
        drafter = Guesser(4, 1.0, has_trees=has_trees)
        world = World(num_pages=300, max_running=4, num_states=8, drafter=drafter, draft_nodes=draft_nodes)
        for head in range(4):
            world.add([head, 1, 2], max_new_tokens=20, ignore_eos=True)
        most = 0
        while True:
            while len(world.results) < 2 and (plan := world.scheduler.plan()) is not None:
                assert plan.draft_parents is None or not has_trees or plan.num_verifies
                most = max(most, int(plan.counts[plan.samples == Samples.ALL].sum()))
                world.results.append(world.rank.execute(plan))
            if not world.results:
                break
            world.receive()
        assert all(world.seen[i] == world.expected(i) for i in world.seen)
        assert most <= draft_nodes and (most > 1) is (draft_nodes > 1)


def test_the_audit_looks_at_states() -> None:
    world = World(num_pages=100, num_states=8, interval=1)
    world.add(DOCUMENT, max_new_tokens=20, ignore_eos=True)
    for _ in range(12):
        world.submit()
        world.receive()
    cache, running = world.scheduler.cache, list(world.scheduler.roster.live.values())
    assert cache.states is not None and running[0].state.snapshot and findings(cache, running).is_clean
    cache.states.pool.allocate(1)
    (words,) = findings(cache, running).messages
    assert words.startswith("state slot") and words.endswith("has 0 owners")
    cache.quarantine(set(), set())
    assert findings(cache).is_clean and cache.states.pool.num_free == 8


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_states_come_back_from_host_memory(write_policy: str) -> None:
    """A prefix whose pages and state have left the device is found again, as long as host memory has both."""
    world = World(
        num_pages=20,
        num_states=3,
        num_host_pages=60,
        num_host_states=12,
        write_policy=write_policy,
        max_running=1,
    )
    found = [ask(world, *DOCUMENT, 1)[0] for _ in range(4)]
    assert found[1:] == [40, 40, 40]
    for head in (5, 6, 7):
        ask(world, *[head] * 40)
    assert not any(node.state for node in nodes_of(world)[:10] if node.key[0] == DOCUMENT[0])
    assert ask(world, *DOCUMENT, 1)[0] == 40
    assert world.scheduler.totals.loaded_tokens


def nodes_of(world: World) -> list[Node]:
    """All nodes, parents first."""
    nodes = list(world.scheduler.cache.tree.roots.values())
    for node in nodes:
        nodes += node.children.values()
    return [node for node in nodes if node.parent is not None]


@pytest.mark.parametrize("has_state", [True, False])
def test_states_come_back_from_storage(has_state: bool) -> None:
    """A prompt that neither the device nor the host has begins at the pages that storage has, if it has a
    state for them too."""
    options = {"num_pages": 40, "num_host_pages": 40, "num_states": 4, "num_host_states": 4}
    first, second = World(**options), World(**options)
    ask(first, *DOCUMENT, 1)
    first.shelf.finish(first.rank)
    second.shelf.pages = first.shelf.pages
    second.shelf.states = first.shelf.states if has_state else {}
    (i,) = second.add([*DOCUMENT, 1], max_new_tokens=3, ignore_eos=True)
    second.shelf.fetch(second.scheduler.roster.live[i], second.rank)
    second.shelf.arrive(second.rank)
    second.run()
    assert second.seen[i] == second.expected(i)
    assert (second.scheduler.totals.cached_tokens, second.shelf.num_adopted_states) == (
        (40, 1) if has_state else (0, 0)
    )
    assert findings(second.scheduler.cache).is_clean


def test_places_that_storage_reads_and_writes_stay_its_own() -> None:
    world = World(num_pages=40, num_host_pages=40, num_states=4, num_host_states=3)
    ask(world, *DOCUMENT, 1)
    states = world.scheduler.cache.host.states
    assert states is not None
    ((node, place),) = states.pin_confirmed()
    (other,) = {1, 2} - {place}
    assert states.pin_confirmed() == [] and states.reserve() == other and states.reserve() == 0
    states.drop(node)
    assert states.reserve() == 0 and states.places.outside == states.places.busy == {1, 2}
    assert findings(world.scheduler.cache).is_clean
    world.scheduler.cache.quarantine(set(), set())
    after = world.scheduler.cache.host.states
    assert after is not None and after.reserve() == 0, "out of use, as long as they are read and written"
    states.places.unpin(place)
    assert states.reserve() == place
    assert states.adopt(None, place) is False and states.pool.num_free == 1


@pytest.mark.parametrize("num_host_states", [0, 4])
def test_copies_of_states_outlive_the_ranks(num_host_states: int) -> None:
    """What host memory has of a prompt is of no use without its state; what was being copied is lost."""
    world = World(num_pages=40, num_host_pages=40, num_states=4, num_host_states=num_host_states)
    ask(world, *DOCUMENT, 1)
    world.die()
    assert ask(world, *DOCUMENT, 1)[0] == (40 if num_host_states else 0)


def test_states_die_with_the_ranks() -> None:
    """What host memory has of a prompt is of no use without its state."""
    world = World(num_pages=40, num_host_pages=40, num_states=4)
    ask(world, *DOCUMENT, 1)
    world.die()
    assert ask(world, *DOCUMENT, 1)[0] == 0
    assert ask(world, *DOCUMENT, 1)[0] == 40
