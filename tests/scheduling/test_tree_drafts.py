"""How many drafts a tree has: as many as pay, by what was accepted of earlier ones and by what steps take."""

from itertools import product
from random import Random

import pytest

from runtime.scheduling.speculation.own import OwnDrafter
from runtime.scheduling.speculation.pace import Pace
from runtime.scheduling.speculation.tree_gains import tree_gains
from tests.scheduling.world import World

BRANCHES, DEPTH, MOST = 3, 4, 24


def nodes(chance: float) -> list[tuple[float, tuple[int, ...]]]:
    """All nodes of a full tree by falling chance: each with its path, a rank among siblings at each level."""
    paths = [path for depth in range(1, DEPTH + 1) for path in product(range(BRANCHES), repeat=depth)]
    found = [(1.0, path) for path in paths]
    for i, (_, path) in enumerate(found):
        right = 1.0
        for rank in path:
            right *= chance * (1 - chance) ** rank
        found[i] = (right, path)
    return sorted(found, key=lambda one: (-one[0], len(one[1])))


@pytest.mark.parametrize("chance", [0.1, 0.35, 0.5, 0.75, 0.95])
def test_gains_are_those_of_all_nodes(chance: float) -> None:
    expected = [right for right, _ in nodes(chance)]
    assert tree_gains(chance, BRANCHES, DEPTH, 255) == pytest.approx(expected)
    assert tree_gains(chance, BRANCHES, DEPTH, 7) == pytest.approx(expected[:7])
    assert tree_gains(chance, 1, DEPTH, 255) == pytest.approx([chance**i for i in range(1, DEPTH + 1)])


def learnt(base_s: float, row_s: float, draft_s: float) -> Pace:
    """A pace that has seen what steps take."""
    pace, random = Pace(), Random(1)
    for _ in range(400):
        rows = random.choice((1, 4, 16, 64))
        drafts = random.choice((0, 8, 24)) * rows
        pace.learn(rows, drafts, base_s + rows * row_s + drafts * draft_s)
    return pace


def drafts(drafter: OwnDrafter, chance: float, rows: int, steps: int = 400) -> tuple[float, float]:
    """A draft model whose first guess is right with `chance`. -> the mean of drafts and of accepted ones in
    the last steps"""
    world = World(num_pages=600)
    for _ in range(rows):
        world.add([1, 2, 3], max_new_tokens=100, ignore_eos=True)
    running, random = list(world.scheduler.roster.live.values()), Random(2)
    planned, accepted, order = 0, 0, [path for _, path in nodes(chance)]
    for step in range(steps):
        drafter.begin(rows)
        for sequence in running:
            draft = drafter.propose(sequence, 50, 50, MOST)
            if draft is None:
                continue
            tree, path = set(order[: len(draft.tokens)]), ()
            while True:
                rank = next((rank for rank in range(BRANCHES) if random.random() < chance), BRANCHES)
                if (*path, rank) not in tree:
                    break
                path = (*path, rank)
            drafter.landed(sequence, len(draft.tokens), len(path))
            if step >= steps - 100:
                planned += len(draft.tokens)
                accepted += len(path)
    return planned / (100 * rows), accepted / (100 * rows)


def of_trees(pace: Pace) -> OwnDrafter:
    return OwnDrafter(MOST, branches=BRANCHES, depth=DEPTH, pace=pace)


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8])
def test_chances_are_found_from_what_is_accepted(chance: float) -> None:
    drafter = of_trees(learnt(1e-2, 1e-5, 1e-5))
    drafts(drafter, chance, 2)
    assert drafter.chances.usual(1) == pytest.approx(chance, abs=0.1)


def test_trees_follow_acceptance_and_load() -> None:
    cheap, dear = (1e-2, 1e-4, 2e-5), (1e-3, 1e-3, 9e-4)  # reading weights takes longest; or computing tokens
    few = {chance: drafts(of_trees(learnt(*cheap)), chance, 1)[0] for chance in (0.02, 0.5, 0.9)}
    assert few[0.02] < few[0.5] and few[0.5] > 10
    many = drafts(of_trees(learnt(*cheap)), 0.5, 64, steps=120)[0]
    assert many < few[0.5] / 2, "more sequences leave less time for drafts of each"
    assert drafts(of_trees(learnt(*dear)), 0.3, 16, steps=200)[0] < 1, "what does not pay is only probed"
