"""What a death of the ranks means for sequences: which wait again, which may run meanwhile, which are given
up."""

from collections.abc import Iterable

from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.scheduling.flight import Flight
from runtime.scheduling.planner import Planner
from runtime.scheduling.suspects import Suspects


class GivenUp(Struct, frozen=True):
    """A request that has ended; its client must still be informed."""

    request_id: str
    sequence_ids: list[int]


class Lost(Struct, frozen=True):
    """What the ranks took with them."""

    num_steps: int  # in flight
    num_requests: int  # that ran, and wait again
    guilty: GivenUp | None  # the request that killed them, by all that is known


class Recovery:
    """Keeps for each sequence that was in flight at a death its *mark*: as many tokens as it would have had
    when those steps were done."""

    def __init__(self, planner: Planner) -> None:
        self.marks: dict[int, int] = {}  # by sequence id
        self._planner = planner
        self._suspects = Suspects()

    @property
    def has_trial(self) -> bool:
        """Whether requests are on trial: then nothing else may run on these ranks."""
        return bool(self._suspects.trial)

    def died(self, flights: Iterable[Flight], *, is_alone: bool = True) -> str | None:
        """The ranks died with these steps in flight, and with no others if this `is_alone`; the roster is as
        it was then. -> the request that is guilty, if that is known now"""
        sequences = {s.id: s for flight in flights for s in flight.concerned}.values()
        if not sequences:
            return None
        in_flight = list(dict.fromkeys(s.request.id for s in sequences))
        self.marks |= {
            s.id: len(s.tokens) + max(s.in_flight + s.drafting, 1) for s in sequences if not s.is_finished
        }
        guilty = self._suspects.died(in_flight, is_alone=is_alone)
        for request_id in in_flight:
            self._pass_if_free(request_id)
        return guilty

    def advance(self, sequences: Iterable[Sequence]) -> None:
        """These have got tokens."""
        for sequence in sequences:
            if len(sequence.tokens) >= self.marks.get(sequence.id, len(sequence.tokens) + 1):
                self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """This one is beyond its mark, or has ended."""
        if self.marks.pop(sequence.id, None) is not None:
            self._pass_if_free(sequence.request.id)

    def isolate(self, flights: Iterable[Flight]) -> bool:
        """While requests are on trial: all others give way. -> whether no step in flight computes one of
        these any more"""
        trial, roster = self._suspects.trial, self._planner.roster
        for sequence in [*roster.extending, *roster.decoding]:
            if sequence.request.id not in trial:
                self._planner.put_back(sequence)
        return all(s.request.id in trial for flight in flights for s in flight.concerned)

    def _pass_if_free(self, request_id: str) -> None:
        """A request has passed when none of its sequences is before its mark."""
        roster = self._planner.roster
        if not any(s.id in self.marks for s in roster.siblings(request_id)):
            self._suspects.passed(request_id)
        roster.waiting.admits_only = self._suspects.trial
