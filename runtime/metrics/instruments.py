"""Counters, gauges and histograms, and their text form.

Own code instead of prometheus_client: an increment is on the step path, once a token for some. Measured on a
2-core server: `add` 0.08 µs and `observe` 0.16 µs here, 0.41 and 1.2 µs there (it locks, which one event loop
does not need). Nothing here is thread-safe.

Text form: Prometheus exposition format 0.0.4.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Protocol


class Instrument(Protocol):
    """A metric with its name, help and type."""

    name: str
    help: str
    kind: str

    def samples(self) -> Iterator[str]:
        """Lines of the text form."""
        ...


class Counter:
    """A number that only grows."""

    __slots__ = ("name", "help", "value")
    kind = "counter"

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Counts up."""
        self.value += amount

    def samples(self) -> Iterator[str]:
        """The one line of the text form."""
        yield f"{self.name} {self.value:.12g}"


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("name", "help", "value")
    kind = "gauge"

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replaces the value."""
        self.value = value

    def samples(self) -> Iterator[str]:
        """The one line of the text form."""
        yield f"{self.name} {self.value:.12g}"


class Labelled:
    """Counters or gauges that differ in the value of one label: `metrics.finished["stop"] += 1`."""

    __slots__ = ("name", "help", "kind", "label", "values")

    def __init__(
        self, name: str, help: str, *, label: str, values: tuple[str, ...] = (), kind: str = "counter"
    ) -> None:
        self.name = name
        self.help = help
        self.kind = kind
        self.label = label
        self.values: dict[str, float] = dict.fromkeys(values, 0.0)

    def __getitem__(self, value: str) -> float:
        return self.values.get(value, 0.0)

    def __setitem__(self, value: str, amount: float) -> None:
        self.values[value] = amount

    def samples(self) -> Iterator[str]:
        """A line for each value of the label."""
        for value, amount in self.values.items():
            yield f'{self.name}{{{self.label}="{_escape(value)}"}} {amount:.12g}'


class Info:
    """A gauge of one sample, whose labels hold facts. Without labels it has no sample."""

    __slots__ = ("name", "help", "labels", "value")
    kind = "gauge"

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help
        self.labels: Mapping[str, str] = {}
        self.value = 1.0

    def set(self, labels: Mapping[str, str], value: float = 1.0) -> None:
        """Replaces all labels, and the value."""
        self.labels, self.value = labels, value

    def samples(self) -> Iterator[str]:
        """The one line of the text form."""
        if self.labels:
            yield f"{self.name}{{{as_labels(self.labels)}}} {self.value:.12g}"


class Histogram:
    """Counts of observations by bucket. `bounds` are the buckets' upper bounds, ascending; one more bucket is
    above all of them."""

    __slots__ = ("name", "help", "bounds", "counts", "sum")
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must ascend"
        self.name = name
        self.help = help
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, quantity: float, times: int = 1) -> None:
        """`times` equal observations, as when one step gives each of its rows a token."""
        self.counts[bisect_left(self.bounds, quantity)] += times
        self.sum += quantity * times

    def samples(self) -> Iterator[str]:
        """A line for each bucket, then sum and count."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {total}'
        yield f"{self.name}_sum {self.sum:.12g}"
        yield f"{self.name}_count {total}"


def render(instruments: list[Instrument], labels: Mapping[str, str] | None = None) -> bytes:
    """The text exposition of `instruments`, in their order; all samples have `labels` in addition to their
    own."""
    lines: list[str] = []
    more = as_labels(labels or {})
    for one in instruments:
        lines += (
            f"# HELP {one.name} {one.help}",
            f"# TYPE {one.name} {one.kind}",
            *(with_labels(line, more) for line in one.samples()),
        )
    return ("\n".join(lines) + "\n").encode()


def as_labels(labels: Mapping[str, str]) -> str:
    """Labels in the text form, without braces."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def with_labels(sample: str, more: str) -> str:
    """`name value` or `name{own} value`, with the labels `more` added."""
    if not more:
        return sample
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{more},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{more}}} {value}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
