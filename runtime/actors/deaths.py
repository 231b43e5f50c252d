"""What deaths of ranks mean for the server: whether new ranks are started, and when.

A rank that fails by itself (an exception, an exit, a crash) while no step is in flight, or while it starts,
points at the model: MAX_IN_VAIN of those in a row end the server. A rank that is killed from outside points
at nothing: new ranks are started for as long as it takes, with pauses that grow. "In a row" is without a step
done, and without ranks that were ready for STABLE_S, in between.

Ranks that the kernel kills for want of memory before any ranks were ready count as failures: the model does
not fit. Later it did fit, and the memory may come back.
"""

from runtime.errors import RankDied

MAX_IN_VAIN = 3
FIRST_PAUSE_S = 0.25  # before ranks are started that were killed twice; it doubles with each further kill
MAX_PAUSE_S = 30.0
STABLE_S = 60.0


class Deaths:
    """Deaths in a row."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.num_kills = 0

    def add(self, died: RankDied, *, points_at_model: bool = False) -> None:
        """Counts a death with no step in flight. `points_at_model`: a kill counts as a failure."""
        if died.is_kill and not points_at_model:
            self.num_kills += 1
        else:
            self.num_failures += 1

    def clear(self) -> None:
        """Ranks have done a step, or were ready for STABLE_S."""
        self.num_failures = self.num_kills = 0

    @property
    def are_final(self) -> bool:
        """Whether no ranks are to be started again."""
        return self.num_failures >= MAX_IN_VAIN

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start: none after the first kill."""
        return pause_s(self.num_kills)


def pause_s(count: int) -> float:
    """The pause after `count` attempts in a row that came to nothing: 0 after the first one."""
    return 0.0 if count < 2 else min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(count - 2, 30))
