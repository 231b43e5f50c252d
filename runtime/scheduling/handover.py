"""Requests that go from one replica's scheduler to another's, with the tokens that they have.

The first one's ranks have died: nothing runs there, and all that is known of a sequence is its tokens. The
other one computes them again, as after a preemption, so answers are those of an undisturbed run.
"""

from collections.abc import Callable

from runtime.cache.sequence import Sequence
from runtime.scheduling.scheduler import Scheduler


def leaving(scheduler: Scheduler, may_leave: Callable[[str], bool]) -> list[str]:
    """Ids of the requests that may go: those that `may_leave`, of which nothing runs, and whose clients did
    not ask for this replica."""
    found = {sequence.request.id: sequence.request for sequence in scheduler.roster.live.values()}
    return [
        request_id
        for request_id, request in found.items()
        if request.replica is None
        and may_leave(request_id)
        and all(s.slot < 0 for s in scheduler.roster.siblings(request_id))
    ]


def fits(source: Scheduler, target: Scheduler, request_id: str) -> bool:
    """Whether the target's sequences can be as long."""
    request = source.roster.siblings(request_id)[0].request
    return target.longest(request) >= source.longest(request)


def hand_over(source: Scheduler, target: Scheduler, request_id: str) -> list[Sequence]:
    """Gives a request to the target, which has room for it (`fits`). -> its sequences that have not ended"""
    siblings = source.roster.siblings(request_id)
    _release(source, siblings)
    _adopt(target, siblings)
    return [sequence for sequence in siblings if not sequence.is_finished]


def _release(scheduler: Scheduler, siblings: list[Sequence]) -> None:
    request, roster = siblings[0].request, scheduler.roster
    for sequence in siblings:
        if not sequence.is_finished:
            scheduler.planner.prompts.drop(sequence)
            scheduler.planner.drop_reports(sequence)
            scheduler.recovery.drop(sequence)
            scheduler.planner.drafts.ended(sequence)
            roster.waiting.remove(sequence)
            roster.shares.leave(request.tenant)
            del roster.live[sequence.id]
    del roster.requests[request.id]
    if request.adapter is not None:
        roster.lora_slots.ended(request.adapter.id, roster.live.values())


def _adopt(scheduler: Scheduler, siblings: list[Sequence]) -> None:
    """Sequences whose common prompt none has computed wait for the first of them, as new ones do; those that
    have tokens go before new ones."""
    request, first, roster = siblings[0].request, siblings[0], scheduler.roster
    roster.requests[request.id] = siblings
    roster.has_levels |= request.is_idle
    opened = [sequence for sequence in siblings if not sequence.is_finished]
    roster.shares.join(request.tenant, len(opened))
    for sequence in opened:
        roster.live[sequence.id] = sequence
        sequence.level = roster.order.level(request.priority, is_idle=request.is_idle)
        sequence.fetched_len = 0
        shares_prompt = sequence.index and not sequence.num_generated
        if shares_prompt and not (first.is_finished or first.num_generated):
            roster.waiting.add_suspended(sequence)
        else:
            roster.waiting.add(sequence, is_new=not sequence.num_generated)
    scheduler.deadlines.add(request)
