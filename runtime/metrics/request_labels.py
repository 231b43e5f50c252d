"""--tokenizer-metrics-allowed-custom-labels: figures of requests by labels that clients give.

A client could name a new value with each request, and each would be time series for ever. So a label has at
most MAX_VALUES values of at most MAX_CHARS characters, and all labels together MAX_SERIES combinations; what
is beyond counts as OTHER.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from runtime.metrics.instruments import Counter, Histogram, as_labels, with_labels
from runtime.metrics.request_records import Record
from runtime.metrics.table import Metrics

MAX_VALUES = 64
MAX_CHARS = 64
MAX_SERIES = 1024
OTHER = "other"

T = TypeVar("T", Counter, Histogram)


class LabelValues:
    """The values of labels that have their own time series."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._values: dict[str, set[str]] = {name: set() for name in self.names}
        self._series: set[tuple[str, ...]] = set()

    def of(self, given: dict[str, str]) -> tuple[str, ...]:
        """The values of all labels, in their order, under which a request counts; "" where it gives none."""
        values = tuple([self._known(name, given.get(name, "")) for name in self.names])
        if values not in self._series:
            if len(self._series) >= MAX_SERIES:
                return (OTHER,) * len(self.names)
            self._series.add(values)
        return values

    def _known(self, name: str, value: str) -> str:
        known = self._values[name]
        if value == "" or value in known:
            return value
        if len(value) > MAX_CHARS or len(known) >= MAX_VALUES:
            return OTHER
        known.add(value)
        return value


class ByLabels(Generic[T]):
    """Counters or histograms of one name, one for each combination of values."""

    def __init__(self, names: Sequence[str], make: Callable[[], T]) -> None:
        """`make`: an instrument that has seen nothing."""
        first = make()
        self.name, self.help, self.kind = first.name, first.help, first.kind
        self._names = tuple(names)
        self._make: Callable[[], T] = make
        self._found: dict[tuple[str, ...], T] = {}

    def __getitem__(self, values: tuple[str, ...]) -> T:
        return self._found.setdefault(values, self._make())

    def samples(self) -> Iterator[str]:
        """The lines of all combinations."""
        for values, one in self._found.items():
            labels = as_labels(dict(zip(self._names, values, strict=True)))
            yield from (with_labels(line, labels) for line in one.samples())


class LabelledRequests:
    """Observes requests that have ended, by their labels. See RequestObserver."""

    def __init__(self, names: Sequence[str], metrics: Metrics) -> None:
        self._values = LabelValues(names)

        def counter(name: str, help: str) -> ByLabels[Counter]:
            return ByLabels(names, lambda: Counter(f"runtime_labelled_{name}_total", help))

        def histogram(name: str, help: str, bounds: tuple[float, ...]) -> ByLabels[Histogram]:
            return ByLabels(names, lambda: Histogram(f"runtime_labelled_{name}_seconds", help, bounds))

        self.requests = counter("requests", "Requests that have ended, by the labels of their clients.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of their prompts.")
        self.generated_tokens = counter("generated_tokens", "Tokens of their answers.")
        self.ttft_s = histogram("time_to_first_token", "To their first token.", metrics.ttft_s.bounds)
        self.e2e_s = histogram("request", "To their end.", metrics.e2e_s.bounds)
        metrics.labelled = [self.requests, self.prompt_tokens, self.generated_tokens, self.ttft_s, self.e2e_s]

    def began(self, record: Record) -> None:
        """Does nothing."""

    def ended(self, record: Record) -> None:
        """Counts the request."""
        values = self._values.of(dict(record.request.labels))
        self.requests[values].add()
        self.prompt_tokens[values].add(record.prompt_tokens)
        self.generated_tokens[values].add(record.completion_tokens)
        if record.first_s is not None:
            self.ttft_s[values].observe(record.first_s - record.began_s)
        if record.ended_s is not None:
            self.e2e_s[values].observe(record.ended_s - record.began_s)
