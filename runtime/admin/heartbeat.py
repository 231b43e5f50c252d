"""Lines about the process itself: how busy it is, and garbage collections that take long."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from runtime import log
from runtime.scheduling.scheduler import Scheduler
from runtime.service import Load


class StepLog:
    """--decode-log-interval: a line every so many steps. Looked at after each round of the scheduler."""

    def __init__(self, interval: int, load: Callable[[], Load]) -> None:
        self._interval = interval
        self._load = load
        self._told = 0  # steps done at the last line
        self._log = log.get("steps")

    def look(self, scheduler: Scheduler, ranks: Any) -> None:
        if scheduler.totals.steps - self._told < self._interval:
            return
        self._told = scheduler.totals.steps
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
        )


@contextmanager
def long_collections(threshold_s: float) -> Iterator[None]:
    """--gc-warning-threshold-secs: warns of those of this process meanwhile; 0: of none."""
    if not threshold_s:
        yield
        return
    began = monotonic()

    def told(phase: str, info: dict[str, int]) -> None:
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

    gc.callbacks.append(told)
    try:
        yield
    finally:
        gc.callbacks.remove(told)
