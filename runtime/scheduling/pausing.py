"""Pauses of the scheduler, and what wants nobody to run: while it is paused no steps are planned, and everything else goes on."""

from runtime.messages import PauseMode
from runtime.scheduling.scheduler import Scheduler


def pause(scheduler: Scheduler, mode: PauseMode) -> None:
    """Plans no more steps. Who runs ends (and who waits with it), waits again with its tokens, or stays where it is."""
    scheduler.is_paused = True
    roster = scheduler.roster
    if mode == "retract":
        for sequence in [*roster.extending, *roster.decoding]:
            scheduler.planner.put_back(sequence)
    elif mode == "abort":
        for request_id in {s.request.id: None for s in roster.live.values()}:
            scheduler.abort(request_id)


def unpause(scheduler: Scheduler) -> None:
    scheduler.is_paused = False


def flush(scheduler: Scheduler) -> int | None:
    """Empties the prefix cache. -> pages freed; None, and nothing done, while sequences or steps use it (copies to host memory do not)"""
    is_used = scheduler.roster.num_running or any(flight.computed for flight in scheduler.flights)
    return None if is_used else scheduler.cache.flush()
