"""Counters, gauges, histograms and their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.metrics.instruments import Counter, Gauge, Histogram, Info, Labelled, render


def test_text_form() -> None:
    counter, gauge = Counter("a_total", "A."), Gauge("b", "B.")
    labelled, histogram = (
        Labelled("c_total", "C.", label="reason", values=("stop",)),
        Histogram("d_s", "D.", (0.1, 1)),
    )
    counter.add()
    counter.add(2)
    gauge.set(1.5)
    labelled['a "b"\n\\'] += 1
    histogram.observe(0.1)
    histogram.observe(0.5, times=2)
    histogram.observe(7)
    assert render([counter, gauge, labelled, histogram]).decode().splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        "a_total 3",
        "# HELP b B.",
        "# TYPE b gauge",
        "b 1.5",
        "# HELP c_total C.",
        "# TYPE c_total counter",
        'c_total{reason="stop"} 0',
        'c_total{reason="a \\"b\\"\\n\\\\"} 1',
        "# HELP d_s D.",
        "# TYPE d_s histogram",
        'd_s_bucket{le="0.1"} 1',
        'd_s_bucket{le="1"} 3',
        'd_s_bucket{le="+Inf"} 4',
        "d_s_sum 8.1",
        "d_s_count 4",
    ]


def test_info_has_one_sample_and_none_before_it_is_set() -> None:
    info = Info("i", "I.")
    assert list(info.samples()) == []
    info.set({"a": "1"})
    info.set({"b": 'x"', "c": ""}, 7)
    assert list(info.samples()) == ['i{b="x\\"",c=""} 7']
    assert b'i{d="e",b="x' in render([info], {"d": "e"})


@given(st.lists(st.floats(min_value=0, max_value=10), max_size=50))
def test_buckets_are_cumulative(quantities: list[float]) -> None:
    histogram = Histogram("h", "H.", (1, 2, 5))
    for quantity in quantities:
        histogram.observe(quantity)
    lines = dict(line.rsplit(" ", 1) for line in histogram.samples())
    for bound in (1, 2, 5):
        assert int(lines[f'h_bucket{{le="{bound}"}}']) == sum(quantity <= bound for quantity in quantities)
    assert int(lines["h_count"]) == len(quantities)
    assert float(lines["h_sum"]) == pytest.approx(sum(quantities))


def test_bounds_ascend() -> None:
    with pytest.raises(AssertionError):
        Histogram("h", "H.", (2, 1))
