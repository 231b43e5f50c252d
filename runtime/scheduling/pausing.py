"""Pauses of the scheduler, and what wants nobody to run: while it is paused no steps are planned, and
everything else goes on."""

from runtime.errors import Busy
from runtime.messages.scheduler import PauseMode
from runtime.scheduling.scheduler import Scheduler


def pause(scheduler: Scheduler, mode: PauseMode) -> None:
    """Plans no more steps. Who runs ends (and who waits with it), waits again with its tokens, or stays where
    it is."""
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
    """Empties the prefix cache. -> pages freed; None, and nothing done, while sequences or steps use it
    (copies to host memory do not)"""
    is_used = scheduler.roster.num_running or any(flight.computed for flight in scheduler.flights)
    return None if is_used else scheduler.cache.flush()


def suspend(scheduler: Scheduler, *, drops_pages: bool) -> Busy | None:
    """Plans no more steps, or says why that cannot be. Who runs stays where it is, and must be paused to
    be."""
    is_still = scheduler.is_paused or scheduler.is_suspended
    if scheduler.roster.num_running and (drops_pages or not is_still):
        return Busy(
            "requests run; try again when none does, or pause them first: /pause_generation with mode retract (they wait with "
            "their tokens and go on later) or abort"
            + ("" if drops_pages else ", or in_place (they keep their pages)")
        )
    scheduler.is_suspended = True
    return None


def resume_planning(scheduler: Scheduler) -> None:
    scheduler.is_suspended = False


def lose_pages(scheduler: Scheduler) -> None:
    """The ranks give all their pages back, with nobody running: prefixes that are nowhere else are gone."""
    assert not scheduler.roster.num_running and not scheduler.flights, "pages that are in use"
    scheduler.roster.restart()
    scheduler.cache.resume(scheduler.config.num_pages)
