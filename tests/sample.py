"""Big matrices of cases, sampled: a run takes some cases of each, `pytest --full` takes all of them.

A test that is marked `@pytest.mark.sampled(n)` keeps about `n` of its parametrized cases: enough that every
value of every parameter occurs, then others at even distances. The choice depends on the cases alone, so two
runs of one commit take the same ones.
"""

from collections.abc import Hashable, Mapping, Sequence


def sample(cases: Sequence[Mapping[str, Hashable]], count: int) -> set[int]:
    """Indices of the cases to keep: each value of each parameter at least once, and `count` at the least.

    `cases`: the parameters of each case, by name.
    """
    kept: set[int] = set()
    seen: set[tuple[str, Hashable]] = set()
    while missing := [len(set(case.items()) - seen) for case in cases]:
        best = max(range(len(cases)), key=lambda i: missing[i])
        if not missing[best]:
            break
        kept.add(best)
        seen |= set(cases[best].items())
    others = [i for i in range(len(cases)) if i not in kept]
    lacking = min(max(count - len(kept), 0), len(others))
    return kept | {others[i * len(others) // lacking] for i in range(lacking)}
