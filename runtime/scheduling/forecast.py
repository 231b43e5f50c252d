"""How many tokens running sequences will still want: what admission keeps free, so that newcomers do not make them give way.

Clients allow more tokens than answers take. The forecast learns which part of what was allowed is used, times `--schedule-conservativeness`. A
sequence that has to give way all the same raises the forecast at once, and it comes down slowly: that is the hysteresis which
keeps a full cache from preempting, admitting and preempting again.
"""

MAX_FUTURE = 4096  # tokens of one sequence that are worth foreseeing: further ahead others will have ended
RAISE = 1.5  # of the forecast, at each preemption
CALM = 0.99  # what is left of a raise after each step
MEMORY = 0.98  # weight of what was learned, at each end of a sequence


class Forecast:
    """`share` of the tokens that running sequences may still take is expected to be taken."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.conservativeness = conservativeness
        self._allowed = 2048.0  # before anything is known: half of it is used
        self._used = 1024.0
        self._raise = 1.0

    @property
    def share(self) -> float:
        return min(self.conservativeness * self._used / self._allowed * self._raise, max(self.conservativeness, 1.0))

    def step(self) -> None:
        if self._raise > 1.0:
            self._raise = max(1.0, self._raise * CALM)

    def preempted(self) -> None:
        if self.share < 1.0:
            self._raise *= RAISE

    def ended(self, used: int, allowed: int) -> None:
        """A sequence took `used` of `allowed` tokens."""
        allowed = min(allowed, MAX_FUTURE)
        self._allowed = self._allowed * MEMORY + allowed
        self._used = self._used * MEMORY + min(used, allowed)
