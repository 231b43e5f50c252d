"""Which lists of a body are token ids."""

import pytest

from runtime.http.fields.token_ids import are_ids


@pytest.mark.parametrize(
    "values, expected",
    [
        ([7], True),
        ([0, -1, 2**63], True),
        ([], False),
        (["a"], False),
        ([7, "a"], False),
        (["a", 7], False),
        ([[7]], False),
        ([7, [7]], False),
        ([7, 0.5], False),
    ],
)
def test_ids_are_whole_numbers_only(values: list[object], expected: bool) -> None:
    assert are_ids(values) == expected
