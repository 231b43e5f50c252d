"""Why a rank died, as far as anyone can tell, for the log and for what follows from it."""

import signal
from collections.abc import Callable

from runtime import log
from runtime.devices.cgroup import memory_limit, num_oom_kills
from runtime.errors import RankDied


class DeathReports:
    """Explains the deaths of ranks, and reports them."""

    def __init__(self, on_death: Callable[[RankDied], None]) -> None:
        """`on_death` is called for each death that is reported."""
        self._on_death = on_death
        self._num_oom_kills = num_oom_kills()

    def explain(self, died: RankDied) -> RankDied:
        """Returns `died`, with the reason added if the kernel killed the rank for want of memory."""
        before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        if not died.is_kill or self._num_oom_kills == before:
            return died
        limit = memory_limit()
        why = (
            "the machine's memory is used up"
            if limit is None
            else f"its control group's limit of {limit.limit_bytes >> 20} MiB ({limit.name}) is used up"
        )
        return RankDied(
            died.rank,
            died.exit_code,
            f"the kernel killed it for want of memory: {why}; raise the limit, or lower --max-total-tokens "
            "or --mem-fraction-static",
            is_for_memory=True,
        )

    def report(self, died: RankDied, generation: int, num_steps: int) -> None:
        """Logs a death with `num_steps` steps in flight."""
        self._on_death(died)
        log.get("ranks").error(
            "a rank died",
            rank=died.rank,
            exit_code=died.exit_code,
            generation=generation,
            steps=num_steps,
            reason=died.reason or _reason(died),
        )


def _reason(died: RankDied) -> str:
    """What is known of a death without a reason."""
    if died.is_kill and died.exit_code is not None:
        return f"it was killed from outside ({signal.Signals(-died.exit_code).name})"
    return "it gave no reason"
