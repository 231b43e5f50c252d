"""What a rank reports while it starts: phase after phase, each with how much of it is done. Torch-free."""

import time
from collections.abc import Callable

from runtime.messages.ranks import LoadPhase

GAP_S = 0.05  # between two reports of one phase

# phase, done, total: bytes of the checkpoint for weights, else a number of parts; a total of 0 is not known
Progress = Callable[[LoadPhase, int, int], None]


def without_progress(phase: LoadPhase, done: int, total: int) -> None:
    """A Progress that reports nothing."""


class Gauge:
    """Counts what is done of one phase, and reports it by percents, not more often than every GAP_S: each
    report wakes the server, and small models would send a hundred in no time."""

    def __init__(
        self, progress: Progress, phase: LoadPhase, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.done = 0
        self._progress = progress
        self._phase = phase
        self._total = total
        self._clock = clock
        self._reported, self._reported_s = 0, clock()
        progress(phase, 0, total)

    def add(self, amount: int) -> None:
        """`amount` more is done."""
        self.done = min(self.done + amount, self._total)
        percent = self.done * 100 // self._total if self._total else 0
        if percent == self._reported:
            return
        now_s = self._clock()
        if percent == 100 or now_s - self._reported_s >= GAP_S:
            self._reported, self._reported_s = percent, now_s
            self._progress(self._phase, self.done, self._total)

    def finish(self) -> None:
        """Everything is done."""
        self.add(self._total - self.done)
