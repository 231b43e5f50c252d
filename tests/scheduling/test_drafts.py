"""Verify rows: drafts change how many steps an answer takes, and no token of it."""

from itertools import product

import numpy as np
import pytest

from runtime.cache.sequence import Sequence
from runtime.messages.requests import Request, TokenBans
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import NO_INTS
from runtime.scheduling.drafts import Draft, forced_draft, take
from runtime.scheduling.speculation.own import IDLE_STEPS, OwnDrafter
from runtime.scheduling.speculation.pace import Pace
from tests.scheduling.guessing import Eager, Guesser
from tests.scheduling.world import World


def steps(world: World) -> int:
    """Runs to the end; asserts that every answer is right. -> steps"""
    world.run()
    assert all(tokens == world.expected(i) for i, tokens in world.seen.items())
    return world.scheduler.totals.steps


@pytest.mark.parametrize(
    ("depth", "page_size", "has_trees"), list(product((1, 2, 3), (1, 4), (False, True))), ids=str
)
def test_tokens_are_those_without_drafts(depth: int, page_size: int, has_trees: bool) -> None:
    for luck in (0.0, 0.6, 1.0):
        drafter = Guesser(5, luck, has_trees=has_trees)
        world = World(depth=depth, page_size=page_size, num_pages=200, drafter=drafter)
        for head in range(3):
            world.add([head, 1, 2, 3], max_new_tokens=40, ignore_eos=True)
        num_steps = steps(world)
        assert drafter.proposed > 50
        assert num_steps < 40 if luck == 1.0 else num_steps <= 43


def test_right_drafts_save_steps() -> None:
    """With one step in flight each brings the drafts and one more token."""

    class Sure(Guesser):
        def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
            self.random.seed(0)
            self.random.randint = lambda low, high: high  # type: ignore[method-assign]
            return super().propose(sequence, first, last, most)

    world = World(depth=1, num_pages=100, drafter=Sure(4, 1.0, has_trees=False))
    world.add([1, 2, 3], max_new_tokens=31, ignore_eos=True)
    assert steps(world) == 1 + 30 / 5


def test_forced_tokens_save_steps() -> None:
    """What a grammar forces is computed in one row, without logits: the oracle asserts that it is right."""
    plain, forced = World(num_pages=100), World(num_pages=100, longest_run=9)
    for world in (plain, forced):
        world.add([1, 2, 3], max_new_tokens=60, ignore_eos=True)
    assert steps(forced) < steps(plain) - 20


def test_forced_tokens_are_sampled_where_bad_words_must_know_them() -> None:
    """A rank reads the tokens of such a slot from what each row samples."""
    for words, is_sure in (((), True), (((7,),), True), (((7, 8),), False)):
        request = Request(
            id="r",
            prompt_ids=[1, 2],
            params=SamplingParams(),
            seed=1,
            arrival_s=0,
            token_bans=TokenBans(NO_INTS.astype(np.uint8), words),
        )
        sequence = Sequence(0, request, 0, 100, frozenset())
        sequence.forced, sequence.forced_at = [5, 6, 7], 2
        draft = forced_draft(sequence, 1)
        assert draft is not None and draft.is_sure is is_sure and request.has_bad_sequences is not is_sure


def test_an_answer_ends_within_what_was_accepted() -> None:
    for luck, stop in product((0.9, 1.0), (True, False)):
        world = World(num_pages=300, drafter=Guesser(7, luck, has_trees=False), max_running=8)
        for head in range(8):
            world.add(
                [head, 5], max_new_tokens=21, ignore_eos=not stop, stop_token_ids=(3, 9) if stop else ()
            )
        steps(world)


def test_pages_are_reserved_for_the_most_and_kept_from_others() -> None:
    """Where memory is short drafts are cut before any sequence gives way for them."""
    counts = []
    for drafter in (None, Guesser(7, 0.5, has_trees=True)):
        world = World(num_pages=14, page_size=2, max_running=3, drafter=drafter, conservativeness=0.0)
        for head in range(3):
            world.add([head, 1], max_new_tokens=9, ignore_eos=True)
        steps(world)
        counts.append(world.scheduler.totals.preemptions)
    assert counts[1] <= counts[0] + 2


def test_drafts_in_flight_are_lost_with_the_ranks() -> None:
    world = World(num_pages=100, drafter=Guesser(6, 0.8, has_trees=True), longest_run=3)
    world.add([1, 2], max_new_tokens=50, ignore_eos=True)
    for _ in range(6):
        while world.submit():
            pass
        world.receive()
    while world.submit():
        pass
    (sequence,) = world.scheduler.roster.live.values()
    assert sequence.in_flight
    world.die()
    assert not sequence.in_flight and not sequence.drafting
    steps(world)


def test_prompts_keep_half_of_a_step() -> None:
    world = World(num_pages=200, chunk=8, drafter=Guesser(100, 1.0, has_trees=False), max_running=2)
    world.add([1] * 8, max_new_tokens=90, ignore_eos=True)
    for _ in range(4):
        world.submit()
        world.receive()
    world.add([2] * 40, max_new_tokens=2, ignore_eos=True)
    plans = [plan for plan in (world.scheduler.plan() for _ in range(1)) if plan is not None]
    assert plans and plans[0].counts[plans[0].num_decodes + plans[0].num_verifies :].sum() >= 4


def test_take_stops_at_the_end() -> None:
    world = World()
    world.add([1, 2], max_new_tokens=4, stop_token_ids=(9,))
    (sequence,) = world.scheduler.roster.live.values()
    assert take(sequence, [5, 9, 6]) == [5, 9] and sequence.tokens.tolist() == [1, 2, 5, 9]
    assert take(sequence, [5, 6, 8]) == [5, 6]


def test_a_draft_is_cut_in_front() -> None:
    tree = Draft([1, 2, 3], [0, 0, 1])
    assert tree.first(3) is tree and tree.first(0) is None
    assert tree.first(2) == Draft([1, 2], [0, 0])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_of_the_ranks_change_no_token(depth: int) -> None:
    """The scheduler plans rows of drafts that it does not know."""
    world = World(depth=depth, num_pages=200, drafter=OwnDrafter(3, pace=Eager()))
    for head in range(3):
        world.add([head, 1, 2, 3], max_new_tokens=40, ignore_eos=True)
    assert steps(world) < 35


def test_a_sequence_that_the_draft_model_did_not_follow_has_no_drafts() -> None:
    drafter = OwnDrafter(3, pace=Eager())
    drafter.follows = False
    world = World(depth=1, num_pages=200, drafter=drafter)
    world.add(list(range(30)), max_new_tokens=60, ignore_eos=True)
    assert world.submit() and world.submit() is False
    world.receive()
    drafter.follows = True
    plans = []
    for head in (1, 2):
        world.add([head], max_new_tokens=30, ignore_eos=True)
        plans += [world.scheduler.plan() for _ in range(3)]
        assert all(plan is not None and plan.follows for plan in plans)
        for plan in plans[-3:]:
            world.results.append(world.rank.execute(plan))
            world.receive()
    old, new = 0, 1
    drafted = [plan.slots[plan.num_decodes : plan.num_decodes + plan.num_verifies].tolist() for plan in plans]
    slots = {s.id: s.slot for s in world.scheduler.roster.live.values()}
    assert all(slots[old] not in row for row in drafted) and any(slots[new] in row for row in drafted)
    steps(world)


def test_a_draft_model_follows_as_long_as_drafts_pay() -> None:
    """And again when fewer sequences run."""

    class Costly(Pace):
        def count(self, chance: float, skipped: int, most: int) -> int:
            return 0

    drafter = OwnDrafter(3, pace=Costly())
    world = World(depth=1, num_pages=700, max_len=1000, drafter=drafter, chunk=64)
    for head in range(4):
        world.add([head, 1], max_new_tokens=IDLE_STEPS + 40 * (head == 0) + 20, ignore_eos=True)
    follows, probed = [], 0
    while (plan := world.scheduler.plan()) is not None:
        follows.append((len(plan.slots), plan.follows))
        probed += plan.num_verifies
        world.results.append(world.rank.execute(plan))
        world.receive()
    assert follows[0][1] and (4, False) in follows, "it was left behind"
    assert follows[-1] == (1, True) and probed > 4
    assert all(tokens == world.expected(i) for i, tokens in world.seen.items())
