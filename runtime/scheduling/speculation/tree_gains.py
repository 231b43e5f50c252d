"""What trees of drafts are expected to bring.

At each position the tokens that a draft model finds likeliest are right with p, p (1 - p), p (1 - p)² and so
on, where p is the chance of its first guess. A node is accepted with the product of these along its path, and
a tree brings as many tokens as the sum over its nodes. Taken by falling chance, nodes form a chain where p is
high, and a broad tree where it is low.
"""

from functools import lru_cache
from heapq import heappop, heappush

STEPS = 20  # chances are rounded to parts of so many


@lru_cache(maxsize=256)
def _gains(part: int, branches: int, depth: int, most: int) -> tuple[float, ...]:
    chance = part / STEPS
    found, nodes = list[float](), [(-1.0, 0)]
    while nodes and len(found) <= most:
        negative, at = heappop(nodes)
        found.append(-negative)
        if at < depth:
            for rank in range(branches):
                heappush(nodes, (negative * chance * (1.0 - chance) ** rank, at + 1))
    return tuple(found[1:])  # without the root, which is no draft


def tree_gains(chance: float, branches: int, depth: int, most: int) -> tuple[float, ...]:
    """Tokens that each further node of a row's tree is expected to bring, falling: of at most `most` nodes,
    `branches` at a position, `depth` behind one another, where the first guess is right with `chance`."""
    return _gains(_part(chance), branches, depth, most)


def tree_trials(chance: float, branches: int, depth: int, num_drafts: int) -> float:
    """In how many trials, each right with `chance`, as many are right as a tree of `num_drafts` brings
    tokens."""
    return sum(_gains(_part(chance), branches, depth, num_drafts)) * STEPS / _part(chance)


def _part(chance: float) -> int:
    return min(STEPS - 1, max(1, round(chance * STEPS)))
