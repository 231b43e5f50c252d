"""The hunt for the request that kills the ranks, without any ranks."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.scheduling.suspects import Suspects


def names(count: int) -> list[str]:
    return [f"r{i}" for i in range(count)]


def hunt(suspects: Suspects, everybody: list[str], guilty: set[str]) -> tuple[str | None, int]:
    """Runs all requests that may run, until one is found guilty or the ranks die no more. Returns it, and how
    many deaths it took."""
    deaths = 0
    for _ in range(1000):
        running = [r for r in everybody if not suspects.trial or r in suspects.trial]
        if not guilty & set(running):
            for request_id in running:
                suspects.passed(request_id)
            if not guilty & set(everybody):
                return None, deaths
            continue
        deaths += 1
        if (found := suspects.died(running)) is not None:
            return found, deaths
    raise AssertionError("the hunt does not end")


def deaths_of(suspects: Suspects, everybody: list[str], guilty: str) -> int:
    """How many deaths one guilty request costs; the innocent pass whenever they run."""
    for deaths in range(1, 100):
        while suspects.trial and guilty not in suspects.trial:
            for request_id in sorted(suspects.trial):
                suspects.passed(request_id)
        running = [r for r in everybody if not suspects.trial or r in suspects.trial]
        if (found := suspects.died(running)) is not None:
            assert found == guilty
            return deaths
    raise AssertionError("the hunt does not end")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 33, 512])
def test_one_guilty_request_is_found_wherever_it_stands(count: int) -> None:
    for guilty in names(count)[:: max(1, count // 40)]:
        suspects = Suspects()
        assert 2 <= deaths_of(suspects, names(count), guilty) <= 2 + ceil(log2(count))
        assert not suspects.trial, "everybody else runs again"


@given(st.integers(1, 40), st.data())
def test_only_the_guilty_are_found_and_all_of_them(count: int, data: st.DataObject) -> None:
    everybody = names(count)
    guilty = set(data.draw(st.lists(st.sampled_from(everybody), unique=True)))
    suspects, left = Suspects(), set(guilty)
    while True:
        found, deaths = hunt(suspects, everybody, left)
        assert deaths <= 2 + ceil(log2(len(everybody) or 1))
        if found is None:
            break
        left.remove(found)  # KeyError: it was innocent
        everybody.remove(found)
    assert not left and not suspects and not suspects.trial


def test_one_death_is_an_accident() -> None:
    suspects = Suspects()
    assert suspects.died(["a"]) is None and not suspects.trial
    suspects.passed("a")
    assert suspects.died(["a"]) is None, "it had passed in between"
    assert suspects.died(["b"]) is None and suspects.died(["c"]) is None
    assert not suspects.trial


def test_only_who_was_there_both_times_is_tried() -> None:
    suspects = Suspects()
    suspects.died(["a", "b", "c"])
    suspects.died(["c", "d", "b", "e"])
    assert suspects.trial == {"c"}
    suspects.passed("c")
    assert suspects.trial == {"b"}
    suspects.passed("b")
    assert not suspects.trial and len(suspects) == 3


def test_company_saves_from_a_verdict() -> None:
    suspects = Suspects()
    suspects.died(["a"])
    assert suspects.died(["a", "gone"]) is None
    assert suspects.died(["a"]) == "a"


def test_who_leaves_during_a_trial_ends_it() -> None:
    suspects = Suspects()
    suspects.died(names(4))
    suspects.died(names(4))
    assert suspects.trial == {"r0", "r1"}
    suspects.passed("r2")
    suspects.passed("r3")
    suspects.passed("r0")
    suspects.passed("r1")
    assert not suspects.trial and not suspects


def test_a_request_is_tried_where_others_were_in_flight_on_the_same_ranks() -> None:
    """Ranks that died had requests of another scheduler as well: either may be to blame."""
    suspects = Suspects()
    assert suspects.died(["a"], is_alone=False) is None and not suspects.trial
    assert suspects.died(["a"], is_alone=False) is None and suspects.trial == {"a"}
    assert suspects.died(["a"]) == "a" and not suspects.trial
    assert suspects.died(["b"]) is None and suspects.died(["b"]) == "b"
