"""A gauge reports percents, and does not wake the server for each of a model that is loaded in no time."""

from runtime.devices.progress import GAP_S, Gauge


def reports(total: int, parts: list[tuple[int, float]]) -> list[tuple[int, int]]:
    """What is reported of a phase of `total`. `parts`: how much is done, and how many seconds it took."""
    found: list[tuple[int, int]] = []
    now = [0.0]
    gauge = Gauge(lambda _, done, of: found.append((done, of)), "weights", total, clock=lambda: now[0])
    for amount, seconds in parts:
        now[0] += seconds
        gauge.add(amount)
    gauge.finish()
    return found


def test_percents_are_reported_that_take_time() -> None:
    assert reports(200, [(1, GAP_S)] * 4) == [(0, 200), (2, 200), (4, 200), (200, 200)]


def test_a_phase_that_is_done_in_no_time_is_reported_twice() -> None:
    assert reports(100, [(1, GAP_S / 200)] * 100) == [(0, 100), (100, 100)]


def test_a_phase_of_unknown_extent_is_reported_once() -> None:
    assert reports(0, [(5, GAP_S)]) == [(0, 0)]
