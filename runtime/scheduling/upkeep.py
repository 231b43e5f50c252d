"""Audits of the cache while the scheduler is idle (cache/audit.py).

If an audit finds a fault the cache is emptied, and pages with no owner or with two are not handed out again
until the ranks are restarted.
"""

from collections.abc import Generator

from msgspec import structs

from runtime.cache.audit import Findings, audit, findings
from runtime.scheduling.scheduler import Scheduler


class Upkeep:
    """Audits one scheduler once after each time that it had work."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._seen_step = 0

    @property
    def is_due(self) -> bool:
        """Whether the scheduler is idle, and has had work since the last audit."""
        scheduler = self.scheduler
        return (
            not (scheduler.roster.live or scheduler.num_in_flight)
            and scheduler.totals.steps != self._seen_step
        )

    def run(self) -> Generator[None, None, Findings]:
        """An audit in portions. A caller that has other work abandons it, and it stays due."""
        found = yield from audit(self.scheduler.cache)
        if not found.is_clean:  # or it has changed meanwhile
            found = findings(self.scheduler.cache)
        self._seen_step = self.scheduler.totals.steps
        if not found.is_clean:
            self._quarantine(found)
        return found

    def _quarantine(self, found: Findings) -> None:
        scheduler = self.scheduler
        cache = scheduler.cache
        cache.quarantine(found.pages, found.hosts | found.busy)
        scheduler.config = structs.replace(scheduler.config, num_pages=cache.pool.num_pages + 1)
        scheduler.roster.waiting.restart(cache.tree)
