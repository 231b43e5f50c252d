"""How signals end the process, at any moment.

While the server starts, SIGTERM and SIGINT end it at once and whatever it does: the kernel does that, and it
ends the ranks with the process that started them. Nothing is lost, because nothing was promised yet.

When it is ready, the first signal drains: running requests have until a deadline, and everything else that
ends, connections and ranks, shares that deadline. A second signal moves it to now. What still hangs then,
in a library or on a disk, is ended by force, with the stacks of all threads on stderr.
"""

import faulthandler
import os
import signal
from math import inf
from time import monotonic

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORCE_S = 3.0  # beyond the deadline, for what ends in order
FORCED = 1  # exit code of a process that was ended by force


def end_at_once_on_signals() -> None:
    """From now on a signal ends the process without running any of its code. The exit status is that of a
    process ended by the signal: 143 in a shell for SIGTERM, 130 for SIGINT."""
    for number in SIGNALS:
        # the kernel does nothing by default to the first process of a container
        signal.signal(number, _leave if os.getpid() == 1 else signal.SIG_DFL)


def _leave(number: int, _: object) -> None:
    os._exit(128 + number)


def end_by_force(after_s: float) -> None:
    """Ends the process after this time if it still runs, with exit code FORCED, by a thread that needs
    nothing of Python. Replaces an earlier time."""
    faulthandler.dump_traceback_later(after_s, exit=True)


class Deadline:
    """When everything must have ended; never, until it is set."""

    def __init__(self) -> None:
        self._at = inf

    @property
    def is_set(self) -> bool:
        """Whether the end was asked for."""
        return self._at < inf

    def set(self, within_s: float) -> None:
        """Everything ends within this time, or at an earlier deadline."""
        self._at = min(self._at, monotonic() + within_s)

    def remaining_s(self) -> float:
        """Seconds until then; 0 when it has passed, infinite when it is not set."""
        return max(0.0, self._at - monotonic())
