"""How long the encoder takes for images, videos and sounds, reported with the step that follows."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from msgspec import structs

from runtime.devices.executor import Pending
from runtime.devices.streams import Event, Streams
from runtime.messages.ranks import ExpertCounts
from runtime.messages.steps import StepResult


class EncodeClock:
    """Times what is launched within `running`: with events where the device computes on its own, else with
    the host's clock."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._seconds = 0.0
        self._events: list[tuple[Event, Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """The encoder runs, or is launched."""
        if self._streams is None:
            begin = perf_counter()
            yield
            self._seconds += perf_counter() - begin
            return
        first, last = (self._streams.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def with_time(self, step: Pending) -> Pending:
        """A step whose result also says how long the encoder took since the step before it."""
        if not self._events and not self._seconds:
            return step
        timed = Timed(step, self._seconds, self._events)
        self._seconds, self._events = 0.0, []
        return timed


class Timed:
    """A step, and the encoder's time before it. See Pending in devices/executor.py."""

    def __init__(self, step: Pending, seconds: float, events: list[tuple[Event, Event]]) -> None:
        """`events`: pairs between which the encoder ran, in the order of the device's work."""
        self._step = step
        self._seconds = seconds
        self._events = events

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._step.is_done()

    def result(self) -> StepResult | ExpertCounts | None:
        """Waits for the step, in any thread."""
        result = self._step.result()
        if not isinstance(result, StepResult):
            return result
        milliseconds = 0.0
        for first, last in self._events:  # before the step in the device's work, so both have come
            last.synchronize()
            milliseconds += first.elapsed_time(last)
        return structs.replace(result, encode_s=self._seconds + milliseconds / 1e3)
