"""Which decode steps are captured, and when."""

import pytest

from runtime.messages.ranks import Captured
from runtime.scheduling.graph_captures import BUSY_EVERY_S, BUSY_STEPS, Captures


def done(size: int, error: str = "") -> Captured:
    return Captured(size, 0.1, 1000, error)


def drain(captures: Captures) -> list[int]:
    """All that is captured while no one comes."""
    sizes = []
    while (size := captures.next(0.0, is_idle=True)) is not None:
        sizes.append(size)
        captures.answered(done(size), 0.0)
    return sizes


def test_small_sizes_first_while_nothing_has_run() -> None:
    captures = Captures((8, 1, 4, 2))
    assert not captures.is_complete and drain(captures) == [1, 2, 4, 8] and captures.is_complete


def test_the_most_used_first() -> None:
    captures = Captures((1, 2, 4, 8))
    for rows, steps in ((3, 10), (8, 30), (0, 100), (9, 100), (1, 5)):
        captures.ran(rows, steps)
    assert drain(captures) == [8, 4, 1, 2]


def test_one_at_a_time() -> None:
    captures = Captures((1, 2))
    assert captures.next(0.0, is_idle=True) == 1 and captures.next(9.0, is_idle=True) is None
    captures.unsent()
    assert captures.next(9.0, is_idle=True) == 1


def test_under_load_what_pays_and_not_often() -> None:
    captures = Captures((1, 2))
    now_s = 100.0
    captures.ran(2, BUSY_STEPS - 1)
    assert captures.next(now_s, is_idle=False) is None
    captures.ran(2, 1)
    captures.ran(1, BUSY_STEPS)
    assert captures.next(now_s, is_idle=False) == 1
    captures.answered(done(1), now_s)
    assert captures.next(now_s + BUSY_EVERY_S / 2, is_idle=False) is None
    assert captures.next(now_s + BUSY_EVERY_S, is_idle=False) == 2


@pytest.mark.parametrize(
    ("captured", "failing", "left"), [((1,), 4, [2]), ((16,), 4, [1, 2]), ((1, 2, 4, 8), 16, [])]
)
def test_a_failure_leaves_the_smaller_ones(captured: tuple[int, ...], failing: int, left: list[int]) -> None:
    captures = Captures((1, 2, 4, 8, 16))
    for size in captured:
        captures.ran(size, 1000)
        assert captures.next(0.0, is_idle=True) == size
        captures.answered(done(size), 0.0)
    captures.ran(failing, 2000)
    assert captures.next(0.0, is_idle=True) == failing
    captures.answered(done(failing, "no memory"), 0.0)
    assert drain(captures) == left and captures.is_complete


def test_other_ranks_begin_anew() -> None:
    captures = Captures((1, 2))
    drain(captures)
    captures.restart()
    assert drain(captures) == [1, 2]
