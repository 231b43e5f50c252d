"""Placements of experts: whole, and as even as those of DeepSeek's published algorithm."""

import numpy as np
import pytest

from runtime.messages.experts import ExpertPlaces, Placement, in_order
from runtime.scheduling.expert_balance import balanced, balanced_over_nodes, group_loads, utilization


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


# the example of DeepSeek's README: loads of two layers, and the placement that it prints: 4 groups of experts
PUBLISHED = (
    (
        [90.0, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    ),
    (
        [20.0, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
    ),
)


def nodes_of_groups(placement: Placement, num_nodes: int, size: int) -> list[set[int]]:
    """The groups of `size` experts that each node has."""
    return [set((row // size).tolist()) for row in np.asarray(placement).reshape(num_nodes, -1)]


@pytest.mark.parametrize(("loads", "theirs"), PUBLISHED)
def test_groups_of_experts_stay_on_a_node(loads: list[float], theirs: Placement) -> None:
    load = np.array(loads)
    found = balanced_over_nodes(load, in_order(12, 16), 8, 2, 4)
    assert len(found) == 16 and set(found) == set(range(12))
    ours, published = (nodes_of_groups(one, 2, 3) for one in (found, theirs))
    assert all(len(node) == 2 for node in (*ours, *published)) and not ours[0] & ours[1]
    assert utilization(load, found, 8) >= utilization(load, theirs, 8) - 1e-9


def published_over_nodes(
    load: np.ndarray, num_places: int, num_groups: int, num_nodes: int, num_expert_groups: int
) -> Placement:
    """What DeepSeek published: groups to nodes, copies within a node, copies to its ranks."""
    size = len(load) // num_expert_groups
    nodes = greedy(load.reshape(num_expert_groups, -1).sum(1), num_expert_groups, num_nodes)
    found: list[int] = []
    for row in np.asarray(nodes).reshape(num_nodes, -1):
        own = (row[:, None] * size + np.arange(size)).flatten()
        found += own[list(greedy(load[own], num_places // num_nodes, num_groups // num_nodes))].tolist()
    return tuple(found)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("experts", "extra", "ranks", "nodes"), [(64, 8, 8, 2), (256, 32, 32, 4)])
def test_nodes_are_as_even_as_with_the_published_algorithm(
    seed: int, experts: int, extra: int, ranks: int, nodes: int
) -> None:
    load, before = skewed(seed, experts), in_order(experts, experts + extra)
    found = balanced_over_nodes(load, before, ranks, nodes, 8)
    assert set(found) == set(range(experts)) and len(found) == len(before)
    groups = nodes_of_groups(found, nodes, experts // 8)
    assert sorted(group for node in groups for group in node) == list(range(8)), "each on one node"
    theirs = published_over_nodes(load, len(before), ranks, nodes, 8)
    assert utilization(load, found, ranks) >= utilization(load, theirs, ranks) - 1e-9
    again = balanced_over_nodes(load, found, ranks, nodes, 8)
    assert again == found, "the same load moves nothing"
