"""Which cases of a big matrix a run takes."""

from itertools import product

from tests.sample import sample

CASES = [{"a": a, "b": b} for a, b in product(range(5), range(7))]


def test_every_value_of_every_parameter_occurs() -> None:
    kept = sample(CASES, 1)
    assert {CASES[i]["a"] for i in kept} == set(range(5)) and {CASES[i]["b"] for i in kept} == set(range(7))
    assert len(kept) < len(CASES) / 2


def test_as_many_as_asked_for() -> None:
    assert len(sample(CASES, 20)) == 20
    assert sample(CASES, 20) == sample(CASES, 20)


def test_small_matrices_are_taken_whole() -> None:
    assert sample(CASES[:3], 10) == {0, 1, 2}
    assert sample([], 3) == set()
