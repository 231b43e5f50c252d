"""Which experts lie where, so that groups of ranks compute equally many tokens.

As DeepSeek's expert parallelism load balancer (EPLB, 2025): busy experts get copies, one after the other for
the expert whose copies have most to do; then copies go to groups, the busiest first, each to the group that
has least to do so far. On several nodes, groups of experts go to nodes first. Beyond it, pairs of copies are
exchanged while that makes the busiest group less busy, and groups and places are chosen so that few weights
have to move.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from runtime.messages.experts import Placement

MAX_EXCHANGES = 256  # of copies in one layer, to make the busiest group less busy
LEAST_GAIN = 1e-4  # of the busiest group's tokens, for which one is made


def group_loads(load: np.ndarray, placement: Placement, num_groups: int) -> np.ndarray:
    """Tokens of each group of ranks, float64 [groups], where the copies of an expert have equal parts of its
    tokens. `load`: tokens of each expert."""
    places = np.asarray(placement)
    shares = load / np.bincount(places, minlength=len(load))
    found: np.ndarray = shares[places].reshape(num_groups, -1).sum(1)
    return found


def utilization(load: np.ndarray, placement: Placement, num_groups: int) -> float:
    """Tokens of the average group by those of the busiest: 1 where all have the same, or none has any."""
    loads = group_loads(load, placement, num_groups)
    return float(loads.mean() / loads.max()) if loads.any() else 1.0


def balancing(
    num_groups: int, num_nodes: int, num_expert_groups: int
) -> Callable[[np.ndarray, Placement], Placement]:
    """How placements are found, given loads and the placement before: over nodes, where there are several and
    these divide groups of ranks and of experts. `num_expert_groups`: of which a router chooses some first."""
    if num_nodes == 1 or num_expert_groups % num_nodes or num_groups % num_nodes:
        return partial(balanced, num_groups=num_groups)
    return partial(
        balanced_over_nodes, num_groups=num_groups, num_nodes=num_nodes, num_expert_groups=num_expert_groups
    )


def balanced(load: np.ndarray, before: Placement, num_groups: int) -> Placement:
    """A placement for experts with this many tokens each, in as many places as `before`, whose experts stay
    where they are as far as that does no harm."""
    groups, loads = packed(load, copies(load, len(before), num_groups), num_groups)
    anew = exchanged(groups, loads)
    shares = load / np.bincount(before, minlength=len(load))
    old = np.asarray(before).reshape(num_groups, -1)
    mended = exchanged(old.copy(), shares[old])
    is_as_even = shares[mended].sum(1).max() <= loads.sum(1).max()
    return in_place((mended if is_as_even else anew).tolist(), before)


def balanced_over_nodes(
    load: np.ndarray, before: Placement, num_groups: int, num_nodes: int, num_expert_groups: int
) -> Placement:
    """As `balanced`, where a router chooses groups of experts first: all experts of such a group, and their
    copies, stay on one node, so that a token travels to few nodes (hierarchical load balancing of EPLB).
    `num_nodes` divides `num_groups` and `num_expert_groups`, which are of consecutive experts."""
    totals = load.reshape(num_expert_groups, -1).sum(1)
    nodes, loads = packed(totals, np.ones(num_expert_groups, np.int64), num_nodes)
    even = exchanged(nodes.copy(), loads)  # of nodes; that of ranks may be better without it
    members = np.arange(len(load)).reshape(num_expert_groups, -1)
    found = [
        _within_nodes(load, before, num_groups, members[way].reshape(num_nodes, -1)) for way in (nodes, even)
    ]
    return max(found, key=lambda placement: utilization(load, placement, num_groups))


def _within_nodes(load: np.ndarray, before: Placement, num_groups: int, nodes: np.ndarray) -> Placement:
    """A placement of each node's experts, int64 [nodes, experts], on its own groups of ranks."""
    size, ranks = len(before) // len(nodes), num_groups // len(nodes)
    old = [before[node * size : (node + 1) * size] for node in range(len(nodes))]
    found = list[int]()
    for places, node in zip(old, _nodes_in_place(list(nodes), old), strict=True):
        own = load[node]
        counts = copies(own, size, ranks)
        ways = [exchanged(*packed(own, counts, ranks, is_apart=is_apart)) for is_apart in (True, False)]
        groups = min(ways, key=lambda way: (own / counts)[way].sum(1).max())
        found += in_place(node[groups].tolist(), places)
    return tuple(found)


def _nodes_in_place(nodes: list[np.ndarray], old: list[Placement]) -> list[np.ndarray]:
    """The nodes' experts in an order of nodes in which many experts stay on the node that has them."""
    stay = {(i, k): int(np.isin(node, old[k]).sum()) for i, node in enumerate(nodes) for k in range(len(old))}
    found: dict[int, np.ndarray] = {}
    left = set(range(len(nodes)))
    for i, k in sorted(stay, key=lambda pair: (-stay[pair], pair)):
        if i in left and k not in found:
            left.remove(i)
            found[k] = nodes[i]
    return [found[k] for k in range(len(old))]


def copies(load: np.ndarray, num_places: int, num_groups: int) -> np.ndarray:
    """Copies of each expert, int64 [experts], at most one for each group unless places would stay empty."""
    counts = np.ones(len(load), np.int64)
    for _ in range(num_places - len(load)):
        can_have_more = counts < num_groups if (counts < num_groups).any() else counts > 0
        counts[np.where(can_have_more, load / counts, -1.0).argmax()] += 1
    return counts


def packed(
    load: np.ndarray, counts: np.ndarray, num_groups: int, *, is_apart: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each group, int64 [groups, places of a group], and the tokens of each of these copies,
    float64 of the same shape. `is_apart`: no group gets two copies of an expert while another has room."""
    size = int(counts.sum()) // num_groups
    groups = np.full((num_groups, size), -1, np.int64)
    loads = np.zeros((num_groups, size))
    filled, totals = np.zeros(num_groups, np.int64), np.zeros(num_groups)
    shares = load / counts
    for expert in np.argsort(-shares, kind="stable"):
        for _ in range(counts[expert]):
            has_it = (groups == expert).any(1) & is_apart
            group = np.lexsort((totals, has_it, filled == size))[0]  # the last key counts first
            groups[group, filled[group]], loads[group, filled[group]] = expert, shares[expert]
            filled[group] += 1
            totals[group] += shares[expert]
    return groups, loads


def exchanged(groups: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """The groups after exchanges between the busiest one and others that make it less busy, without making
    the other as busy. Changes its arguments."""
    for _ in range(MAX_EXCHANGES):
        totals = loads.sum(1)
        busiest = int(totals.argmax())
        less = loads[busiest][None, :, None] - loads[:, None, :]  # [groups, its places, the other's places]
        gains = np.minimum(less, (totals[busiest] - totals)[:, None, None] - less)
        has_mine = (groups[:, None, :] == groups[busiest][None, :, None]).any(2)  # [groups, its places]
        has_theirs = np.isin(groups, groups[busiest])  # [groups, the other's places]
        gains[has_mine[:, :, None] | has_theirs[:, None, :]] = 0
        other, i, j = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[other, i, j] <= LEAST_GAIN * totals[busiest]:
            break
        for part in (groups, loads):
            part[busiest, i], part[other, j] = part[other, j], part[busiest, i]
    return groups


def in_place(groups: Sequence[Sequence[int]], before: Placement) -> Placement:
    """The placement that has these groups of experts, in the order of groups and at the places within them
    in which many experts stay where `before` has them."""
    size = len(before) // len(groups)
    old = [before[i * size : (i + 1) * size] for i in range(len(groups))]
    common = {
        (i, k): (Counter(group) & Counter(places)).total()
        for i, group in enumerate(groups)
        for k, places in enumerate(old)
    }
    found: dict[int, tuple[int, ...]] = {}
    left = set(range(len(groups)))
    for i, k in sorted(common, key=lambda pair: (-common[pair], pair)):
        if i in left and k not in found:
            left.remove(i)
            found[k] = _stay(groups[i], old[k])
    return tuple(expert for k in range(len(groups)) for expert in found[k])


def _stay(group: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """A group's experts at places: those that it had are where they were, others where there is room."""
    coming = Counter(group)
    kept: list[int | None] = []
    for expert in places:
        stays = coming[expert] > 0
        coming[expert] -= stays
        kept.append(expert if stays else None)
    new = coming.elements()
    return tuple(next(new) if expert is None else expert for expert in kept)
