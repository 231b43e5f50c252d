"""What of a sequence's operations is slow: by the time of the processor, whatever else the machine does."""

import pytest

from runtime.grammar import trial
from runtime.grammar.trial import MAX_SLOW, MAX_STEP_S, SLOW_S, Stopwatch


@pytest.mark.parametrize(
    ("cpu_s", "wall_s", "slow"),
    [
        (0.5 * SLOW_S, 0.5 * SLOW_S, 0),
        (0.5 * SLOW_S, 10.0, 0),  # the processor did other work
        (1.1 * SLOW_S, 1.1 * SLOW_S, 1),
        (1.1 * SLOW_S, 10.0, 1),
        (1.1 * MAX_STEP_S, 1.1 * MAX_STEP_S, MAX_SLOW),
    ],
)
def test_slow_is_what_the_processor_worked_for_long(
    cpu_s: float, wall_s: float, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "thread_time", lambda: 3.0 + cpu_s)
    monkeypatch.setattr(trial, "perf_counter", lambda: 7.0 + wall_s)
    watch = Stopwatch()
    assert watch.is_over(3.0, 7.0) == (slow == MAX_SLOW)
    assert watch.num_slow == slow


def test_a_fast_operation_after_slow_ones_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch()
    watch.num_slow = MAX_SLOW
    monkeypatch.setattr(trial, "perf_counter", lambda: 7.0)
    assert watch.is_over(3.0, 7.0)
