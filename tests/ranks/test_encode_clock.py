"""What is reported of the encoder's time: by the host's clock, or by the events of a device."""

import time
from typing import Any

import pytest
from msgspec import structs

from runtime.messages.steps import StepResult
from runtime.ranks.encode_clock import EncodeClock
from tests.devices.streams import EVENT_MS, Streams

NOTHING: Any = None
RESULT = StepResult(7, NOTHING, -1, NOTHING, NOTHING, NOTHING, [], 0.5)


class Step:
    def __init__(self, result: StepResult | None = RESULT) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult | None:
        return self._result


def test_the_host_is_timed_where_calls_are_done_when_they_return() -> None:
    clock = EncodeClock(None)
    with clock.running():
        time.sleep(0.01)
    timed = clock.with_time(Step())
    assert timed.is_done()
    result = timed.result()
    assert isinstance(result, StepResult) and 0.01 <= result.encode_s < 10
    assert structs.replace(result, encode_s=0.0) == RESULT
    later = Step()
    assert clock.with_time(later) is later, "it was reported"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_device_is_timed_by_its_events(is_late: bool) -> None:
    streams = Streams(is_late=is_late)
    clock = EncodeClock(streams)  # type: ignore[arg-type]
    for _ in range(2):
        with clock.running():
            pass
    result = clock.with_time(Step()).result()
    assert isinstance(result, StepResult) and result.encode_s == pytest.approx(2 * EVENT_MS / 1e3)


def test_a_rank_that_reports_nothing_has_no_time() -> None:
    clock = EncodeClock(None)
    with clock.running():
        time.sleep(0.001)
    assert clock.with_time(Step(None)).result() is None
