"""How far something is that takes long, for people: one line that is written over on a terminal, else a log
line every few seconds."""

import math
import time
from collections.abc import Callable

from msgspec import Struct

from runtime import log

LOG_S = 5.0  # between log lines
REDRAW_S = 0.5  # on a terminal
MIN_RATE_S = 2.0  # a rate is said of at least so long a time


class Amount(Struct, frozen=True):
    """How many bytes of how many are done."""

    done: int
    total: int
    rate: float = 0.0  # bytes per second; 0: not known yet
    left_s: float = math.inf  # seconds left at that rate

    @classmethod
    def measured(cls, done: int, total: int, first: int, seconds: float) -> "Amount":
        """`first` bytes were done when it began, `seconds` ago."""
        rate = (done - first) / seconds if seconds >= MIN_RATE_S else 0.0
        return cls(done, total, rate, (total - done) / rate if rate else math.inf)

    def __str__(self) -> str:
        """For people: `1.2 of 15.0 GB, 42 MB/s, 5 min left`."""
        text = f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        if math.isinf(self.left_s):
            return text
        return f"{text}, {self.rate / 1e6:.0f} MB/s, {duration(self.left_s)} left"


def duration(seconds: float) -> str:
    """Seconds for people, as `33 s` or `5 min`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class ProgressLine:
    """Shows what is being done, until it is ended. Log lines go on above it."""

    def __init__(self, part: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`part`: of the log lines."""
        self._log = log.get(part)
        self._clock = clock
        self._shown_s: float | None = None  # None: it has not begun

    def show(self, event: str, progress: str) -> None:
        """Shows the line if it is time to: the first call begins it, so what is short stays unmentioned."""
        now = self._clock()
        if self._shown_s is None:
            self._shown_s = now
        if now - self._shown_s < (REDRAW_S if log.is_terminal() else LOG_S):
            return
        self._shown_s = now
        if log.is_terminal():
            log.overwrite(f"{event}: {progress}" if progress else event)
        else:
            self._log.info(event, progress=progress)

    def end(self) -> None:
        """Takes the line away."""
        self._shown_s = None
        log.overwrite("")
