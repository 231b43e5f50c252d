"""Placements of experts: whole, and as even as those of DeepSeek's published algorithm."""

import numpy as np
import pytest

from runtime.messages.experts import ExpertPlaces, Placement, in_order
from runtime.scheduling.expert_balance import balanced, group_loads, utilization


def skewed(seed: int, num_experts: int) -> np.ndarray:
    """Tokens of experts, of which a few have most."""
    random = np.random.default_rng(seed)
    return np.round(random.zipf(1.3 + random.random(), num_experts).clip(max=10_000) * 10.0)


def greedy(load: np.ndarray, num_places: int, num_groups: int) -> Placement:
    """What DeepSeek published: copies for the busiest, then each copy to the least busy group with room."""
    counts = np.ones(len(load), int)
    for _ in range(num_places - len(load)):
        counts[(load / counts).argmax()] += 1
    items = sorted(
        ((load[e] / counts[e], e) for e in range(len(load)) for _ in range(counts[e])), reverse=True
    )
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    totals = [0.0] * num_groups
    for share, expert in items:
        free = [g for g in range(num_groups) if len(groups[g]) < num_places // num_groups]
        group = min(free, key=totals.__getitem__)
        groups[group].append(expert)
        totals[group] += share
    return tuple(expert for group in groups for expert in group)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("experts", "extra", "groups"), [(8, 0, 2), (8, 2, 2), (64, 8, 8), (256, 32, 8)])
def test_as_even_as_the_published_algorithm(seed: int, experts: int, extra: int, groups: int) -> None:
    load, before = skewed(seed, experts), in_order(experts, experts + extra)
    found = balanced(load, before, groups)
    assert len(found) == len(before) and set(found) == set(range(experts))
    ours, theirs = (utilization(load, one, groups) for one in (found, greedy(load, len(before), groups)))
    assert ours >= theirs - 1e-9, "at least as even"
    assert ours >= utilization(load, before, groups)
    per_group = np.asarray(found).reshape(groups, -1)
    if extra <= experts:
        assert all(len(set(row)) == len(row) for row in per_group.tolist()), "no group has a copy twice"


def test_what_is_even_stays() -> None:
    load, before = np.full(16, 7.0), in_order(16, 16)
    assert balanced(load, before, 4) == before and utilization(load, before, 4) == 1
    assert utilization(np.zeros(16), before, 4) == 1, "no tokens are even"


def test_few_move() -> None:
    """A slight change of the load leaves most experts where they are."""
    load = skewed(3, 64)
    before = balanced(load, in_order(64, 72), 8)
    load[5] *= 1.2
    after = balanced(load, before, 8)
    rows = np.asarray(before).reshape(8, -1), np.asarray(after).reshape(8, -1)
    stay = sum(a == b for a, b in zip(before, after, strict=True))
    same = sum(len(set(a) & set(b)) for a, b in zip(*rows, strict=True))
    assert stay == same, "what stays in a group keeps its place"


def test_loads_of_groups() -> None:
    """Copies of expert 0 share its tokens."""
    load = np.array([6.0, 2, 2, 2])
    placement = (0, 1, 2, 3, 0, 0)
    assert group_loads(load, placement, 2).tolist() == [2 + 2 + 2, 2 + 2 + 2]
    assert utilization(load, (0, 1, 2, 3), 2) == pytest.approx(6 / 8)


def test_in_order_with_copies() -> None:
    assert ExpertPlaces(2).of_layer(0, 4) == (0, 1, 2, 3, 0, 1)
    assert ExpertPlaces(2, layers={1: (3, 2, 1, 0, 3, 2)}).of_layer(1, 4)[0] == 3
