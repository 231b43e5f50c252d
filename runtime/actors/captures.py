"""Has the ranks capture decode steps, between the steps and when nothing is to do. What to capture is in scheduling/captures.py."""

from time import monotonic
from typing import Protocol

from runtime import log
from runtime.messages import Capture, Captured
from runtime.metrics import Metrics
from runtime.scheduling.captures import Captures
from runtime.scheduling.scheduler import Scheduler


class CapturingRanks(Protocol):
    """What it needs of the ranks of one generation (actors/ranks.py)."""

    captured: list[Captured]  # answers that have come; the ranks wake whoever waits for results

    def submit(self, plan: Capture) -> bool: ...


class Capturing:
    """Looked at after each round of the scheduler."""

    def __init__(self, captures: Captures, metrics: Metrics) -> None:
        self._captures = captures
        self._metrics = metrics
        self._ranks: CapturingRanks | None = None
        self._steps = 0  # seen
        self._log = log.get("graphs")

    def look(self, scheduler: Scheduler, ranks: CapturingRanks) -> None:
        captures = self._captures
        if ranks is not self._ranks:
            captures.restart()
            self._ranks = ranks
        while ranks.captured:
            answer = ranks.captured.pop(0)
            captures.answered(answer, monotonic())
            self._tell(answer)
        self._metrics.captured_sizes.set(len(captures.done))
        steps = scheduler.totals.steps - self._steps
        self._steps += steps
        if captures.is_complete:
            return
        captures.ran(scheduler.roster.num_running, steps)
        size = captures.next(monotonic(), is_idle=not (scheduler.roster.live or scheduler.num_in_flight))
        if size is not None and not ranks.submit(Capture(size)):
            captures.unsent()

    def _tell(self, answer: Captured) -> None:
        self._metrics.capture_s.add(answer.seconds)
        if answer.error:
            self._metrics.capture_failures.add(1)
            self._log.warning("decode steps of so many sequences, and of more that are not captured yet, are launched kernel by kernel: "
                              "they could not be captured", sequences=answer.size, reason=answer.error)
            return
        self._log.info("captured", sequences=answer.size, seconds=round(answer.seconds, 3), mib=round(answer.num_bytes / 2**20, 1),
                       done=len(self._captures.done), of=len(self._captures.sizes))
