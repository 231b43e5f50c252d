"""Worker threads that run Python give way to the event loop."""

from collections.abc import Callable, Iterator

import pytest

from runtime import gil
from runtime.gil import give_way, giving_way


class Clock:
    """A clock that goes forward by `step_s` with each look at it, and by pauses."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 100.0
        self.step_s = step_s
        self.pauses = 0

    def read(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Clock]]:
    def make(step_s: float) -> Clock:
        clock = Clock(step_s)
        monkeypatch.setattr(gil, "perf_counter", clock.read)
        monkeypatch.setattr(gil, "sleep", clock.sleep)
        return clock

    yield make


def looks(count: int) -> int:
    for _ in range(count):
        give_way()
    return count


def test_a_thread_pauses_when_it_has_run_for_so_long(clock: Callable[[float], Clock]) -> None:
    often = clock(gil.RUN_S / 2)
    assert giving_way(looks, 300) == 300
    assert 90 <= often.pauses <= 150  # a pause resets the time, which is one look more
    seldom = clock(gil.RUN_S / 100)
    giving_way(looks, 300)
    assert 1 <= seldom.pauses <= 3


def test_who_is_no_worker_never_pauses(clock: Callable[[float], Clock]) -> None:
    """Also behind a call that raised, as threads are used again."""
    time = clock(gil.RUN_S)
    looks(10)
    with pytest.raises(ZeroDivisionError):
        giving_way(lambda: 1 // 0)
    looks(10)
    assert not time.pauses
