"""Pauses of the scheduler, and what needs that no sequence runs. While it is paused no steps are planned, and
everything else goes on."""

from runtime.errors import Busy
from runtime.messages.scheduler import PauseMode
from runtime.scheduling.scheduler import Scheduler


def pause(scheduler: Scheduler, mode: PauseMode) -> None:
    """Plans no more steps. By `mode`, all sequences end, running ones wait again with their tokens, or they
    stay where they are."""
    scheduler.is_paused = True
    roster = scheduler.roster
    if mode == "retract":
        for sequence in [*roster.extending, *roster.decoding]:
            scheduler.planner.put_back(sequence)
    elif mode == "abort":
        for request_id in {s.request.id: None for s in roster.live.values()}:
            scheduler.abort(request_id)


def unpause(scheduler: Scheduler) -> None:
    """Plans steps again."""
    scheduler.is_paused = False


def flush(scheduler: Scheduler) -> int | None:
    """Empties the prefix cache, and forgets encodings of images and sounds, and texts that drafts are found
    in. -> pages freed; None, and nothing done, while sequences or steps use it (copies to host memory do
    not)"""
    is_used = scheduler.roster.num_running or any(flight.computed for flight in scheduler.flights)
    if is_used:
        return None
    if (drafter := scheduler.planner.drafts.drafter) is not None:
        drafter.forget()
    if scheduler.planner.encodings is not None:
        scheduler.planner.encodings.forget(is_lost=False)
    return scheduler.cache.flush()


def suspend(scheduler: Scheduler, *, drops_pages: bool) -> Busy | None:
    """Plans no more steps, or returns why that is not possible. Running sequences must be paused, and stay
    where they are."""
    is_still = scheduler.is_paused or scheduler.is_suspended
    if scheduler.roster.num_running and (drops_pages or not is_still):
        return Busy(
            "requests run; try again when none does, or pause them first: /pause_generation, mode retract "
            "(they wait with their tokens and go on later) or abort"
            + ("" if drops_pages else ", or in_place (they keep their pages)")
        )
    scheduler.is_suspended = True
    return None


def resume_planning(scheduler: Scheduler) -> None:
    """Plans steps again after `suspend`."""
    scheduler.is_suspended = False


def lose_pages(scheduler: Scheduler) -> None:
    """The ranks give all their pages back while no sequence runs: prefixes that are not in host memory are
    lost."""
    assert not scheduler.roster.num_running and not scheduler.flights, "pages that are in use"
    scheduler.roster.restart()
    scheduler.cache.resume(scheduler.config.num_pages)
