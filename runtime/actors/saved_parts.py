"""What ranks say while a step runs: which layers of its pages are in host memory, for which other servers may
wait."""

from runtime.actors.ranks import Ranks
from runtime.scheduling.scheduler import Scheduler
from runtime.transfer.fetches import PageFetches


def take_saved_parts(pages: PageFetches, group: int, scheduler: Scheduler, ranks: Ranks) -> None:
    """Takes what the ranks of an attention group have said since the last call. With the first two arguments
    given it is an observer of SchedulerActor."""
    own = [saved for saved in ranks.saved if saved.group == group]
    for saved in own:
        ranks.saved.remove(saved)
        scheduler.cache.host.saved_parts.add(saved.step, saved.rank, saved.num_parts)
    if own:
        pages.saved()
