"""Watchdogs of the ranks: they notice when a step has been in flight for too long and none has finished."""

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Protocol

import anyio

from runtime import log

CHECKS = 8  # within the time limit


class Watched(Protocol):
    """What is known of steps."""

    @property
    def last_step(self) -> int:
        """The latest step whose result was taken in."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and whose results have not come."""
        ...


class Watchdog:
    """Notices that a step has been in flight for `limit_s` and none has finished."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._last_step = -1
        self._since_s = 0.0

    def is_stuck(self, now_s: float, steps: Watched) -> bool:
        """Whether the ranks hang. To be called from time to time."""
        if steps.last_step != self._last_step or not steps.num_in_flight:
            self._last_step, self._since_s = steps.last_step, now_s
        return now_s - self._since_s >= self.limit_s


async def watch(steps: Watched, limit_s: float, abandon: Callable[[str], Awaitable[None]]) -> None:
    """--watchdog-timeout: calls `abandon` with the reason, once, when the ranks hang."""
    watchdog = Watchdog(limit_s)
    while not watchdog.is_stuck(monotonic(), steps):
        await anyio.sleep(limit_s / CHECKS)
    await abandon(f"no step was done in {limit_s:g} s (--watchdog-timeout); its stack is in the log")


async def watch_softly(steps: Watched, limit_s: float, dump_stacks: Callable[[], None]) -> None:
    """--soft-watchdog-timeout: has stacks written to the log, once for each step that takes so long. Runs
    until cancelled."""
    watchdog, reported = Watchdog(limit_s), -1
    while True:
        await anyio.sleep(limit_s / CHECKS)
        if watchdog.is_stuck(monotonic(), steps) and steps.last_step != reported:
            reported = steps.last_step
            log.get("ranks").warning(
                "no step was done for a while (--soft-watchdog-timeout); stacks follow",
                seconds=limit_s,
                last_step=reported,
                steps_in_flight=steps.num_in_flight,
            )
            dump_stacks()
