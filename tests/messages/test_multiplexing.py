"""How a card is divided between prompts and decodes."""

import pytest

from runtime.messages.multiplexing import Multiplexing


@pytest.mark.parametrize(
    ("num_sms", "unit", "count", "prompts"),
    [
        (132, 8, 6, [112, 104, 96, 88, 80, 72]),
        (132, 8, 2, [112, 72]),
        (132, 8, 1, [112]),
        (108, 2, 3, [92, 72, 54]),
        (40, 8, 6, [24]),  # there are no more
    ],
)
def test_divisions_are_of_the_whole_card(num_sms: int, unit: int, count: int, prompts: list[int]) -> None:
    found = Multiplexing(num_divisions=count).divisions(num_sms, unit)
    assert [division.prompts for division in found] == prompts
    assert all(sum(division) == num_sms and division.decodes >= 16 for division in found)


def test_more_decodes_have_more_of_it() -> None:
    made_up, given = Multiplexing(), Multiplexing(manual=((112, 20, 2), (96, 36, 10), (64, 68, 20)))
    assert [made_up.choose(rows, 6) for rows in (1, 6, 11, 12, 18, 35, 36, 500)] == [0, 0, 0, 1, 2, 4, 5, 5]
    assert [given.choose(rows, 3) for rows in (1, 2, 9, 10, 19, 20, 500)] == [0, 0, 0, 1, 1, 2, 2]
    for one, count in ((made_up, 6), (given, 3)):
        assert [one.choose(rows, count) for rows in one.least_rows(count)] == list(range(count))


@pytest.mark.parametrize(
    ("manual", "num_sms", "reason"),
    [
        (((112, 24, 1),), 132, "adds up to 136, and the card has 132 multiprocessors"),
        (((110, 22, 1),), 132, "multiple of 8"),
        ((), 20, "too few for two parts"),
    ],
)
def test_what_a_card_does_not_do(manual: tuple[tuple[int, int, int], ...], num_sms: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Multiplexing(manual=manual).divisions(num_sms, 8)
