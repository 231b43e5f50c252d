"""Which request kills the ranks? Knows request ids and deaths only.

    died(requests in flight)   the ranks have died. -> the guilty request, if it is found
    passed(request)            it has got the tokens that were in flight when the ranks died, or has ended

The first death may be an accident (an operator, the kernel's OOM killer): all requests run again. A request
that is in flight at two deaths without having passed in between is a *candidate*, and candidates are tried by
halves, as in a binary search:

    candidates = trial + rest       only `trial` runs, so a death in a trial can only be the trial's doing
    the ranks die                   the candidates are those of the trial that were in flight
    every one of the trial passed   the candidates are the rest
    then                            the first half of the candidates becomes the trial
    no candidate is left            it was no single request's fault: all requests run
    the ranks die with a single     it is guilty; all others run
      request in flight that was
      so at an earlier death too

It ends. Each event of a trial leaves at most half of the candidates, rounded up, and of one candidate none:
it dies alone or passes. So one of N requests that always kills the ranks at the same place costs 2 + log2(N)
deaths, rounded up. Between two such searches a request has failed, or requests that passed have got tokens,
and of both there are finitely many. A guilty request was in flight at two deaths, at the second one alone.
"""

from collections.abc import Collection, Sequence


class Suspects:
    """`trial` holds the only requests that may run; while it is empty, all may."""

    def __init__(self) -> None:
        self.trial: frozenset[str] = frozenset()
        self._rest: list[str] = []  # candidates that wait for their trial
        self._marked: set[str] = set()  # in flight at a death, and not passed since

    def __len__(self) -> int:
        return len(self._marked)

    def died(self, in_flight: Sequence[str], *, is_alone: bool = True) -> str | None:
        """The ranks died while these requests were computed, in any order, each named once; and no others, if
        this `is_alone`: where several schedulers share ranks, a single request is tried before it is guilty.
        -> the guilty one, which is forgotten here"""
        again = [request_id for request_id in in_flight if request_id in self._marked]
        self._marked.update(in_flight)
        if is_alone and len(again) == len(in_flight) == 1:
            self._try([])
            self._marked.discard(again[0])
            return again[0]
        self._try(again)
        return None

    def passed(self, request_id: str) -> None:
        """This request is beyond the point at which the ranks died, or it has ended."""
        self._marked.discard(request_id)
        if self.trial and self.trial.isdisjoint(self._marked):
            self._try([candidate for candidate in self._rest if candidate in self._marked])

    def _try(self, candidates: Collection[str]) -> None:
        ordered = list(candidates)
        half = (len(ordered) + 1) // 2
        self.trial, self._rest = frozenset(ordered[:half]), ordered[half:]
