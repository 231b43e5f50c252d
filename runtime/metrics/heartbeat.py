"""Log lines about the process itself: its load every so many steps, and long garbage collections."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from runtime import log
from runtime.scheduling.scheduler import Scheduler
from runtime.service import Load


class StepLog:
    """--decode-log-interval: a line every `interval` steps. Observes each round of the scheduler."""

    def __init__(
        self, interval: int, load: Callable[[], Load], fields: Mapping[str, int] | None = None
    ) -> None:
        """`fields`: fields of each line, in addition to the load."""
        self._interval = interval
        self._load = load
        self._fields = dict(fields or {})
        self._logged_steps = 0  # steps done at the last line
        self._log = log.get("steps")

    def observe(self, scheduler: Scheduler, ranks: object) -> None:
        """Writes a line when it is due."""
        if scheduler.totals.steps - self._logged_steps < self._interval:
            return
        self._logged_steps = scheduler.totals.steps
        load = self._load()
        self._log.info(
            "running",
            running=load.running,
            waiting=load.waiting,
            tokens_per_s=round(load.tokens_per_s, 1),
            used_pages=load.used_pages - load.cached_pages,
            cached_pages=load.cached_pages,
            pages=load.total_pages,
            steps=load.steps,
            **self._fields,
        )


@contextmanager
def log_long_collections(threshold_s: float) -> Iterator[None]:
    """--gc-warning-threshold-secs: warns of garbage collections of this process that take longer, while the
    context is open. 0: never."""
    if not threshold_s:
        yield
        return
    began = monotonic()

    def report(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = monotonic()
        elif (seconds := monotonic() - began) > threshold_s:
            log.get("gc").warning(
                "a garbage collection took long",
                seconds=round(seconds, 3),
                generation=info["generation"],
                collected=info["collected"],
            )

    gc.callbacks.append(report)
    try:
        yield
    finally:
        gc.callbacks.remove(report)
