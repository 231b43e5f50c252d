"""Two trees are compared by what both of them record."""

import pytest

from bench.compare import compare, numbers


def test_numbers_are_named_by_their_path() -> None:
    record = {"runs": [{"streams": 64, "itl_ms": {"p50": 0.5}, "is_warm": True, "name": "http"}], "total": 2}
    assert dict(numbers(record, "")) == {"runs[0].streams": 64, "runs[0].itl_ms.p50": 0.5, "total": 2}


def test_the_ratio_is_taken_turn_by_turn() -> None:
    """The machine is twice as slow in the second turn: the ratio does not see it."""
    before = [
        {"us": 20.0, "only_before": 1.0},
        {"us": 40.0, "only_before": 1.0},
        {"us": 22.0, "only_before": 1.0},
    ]
    after = [{"us": 10.0}, {"us": 20.0}, {"us": 11.0}]
    assert compare(before, after) == {"us": {"before": 22.0, "after": 11.0, "ratio": 0.5}}


@pytest.mark.parametrize("value", [0, 0.0])
def test_a_zero_has_no_ratio(value: float) -> None:
    assert compare([{"idle": value}], [{"idle": 1.0}]) == {}
