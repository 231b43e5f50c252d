"""Which cases of a big matrix a run takes."""

from itertools import product

import pytest

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_a_marked_matrix_is_sampled(a: int, b: int, request: pytest.FixtureRequest) -> None:
    cases = [item for item in request.session.items if item.name.startswith(request.node.originalname)]
    is_whole = request.config.getoption("--full") or any("::" in name for name in request.config.args)
    assert is_whole or len(cases) == 4
