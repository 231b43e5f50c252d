"""When requests must have begun, and when they must have ended."""

from heapq import heappop, heappush
from math import inf

from msgspec import Struct

from runtime.messages.requests import Request


class Limit(Struct, frozen=True, kw_only=True):
    """Time limits of requests that ask for no shorter ones. None: no limit."""

    queue_s: float | None = None  # from arrival to the first step
    total_s: float | None = None  # from arrival to the end


class Deadlines:
    """Deadlines of requests, the next one first. Those of requests that have ended stay: the caller of `due`
    checks."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.next_s = inf
        self._heap: list[tuple[float, str, bool]] = []  # when, request id, whether it is the queue's

    def add(self, request: Request) -> None:
        """Notes the deadlines of a request, if it has any."""
        limit = self.limit
        for requested, most, is_queue in (
            (request.queue_timeout_s, limit.queue_s, True),
            (request.timeout_s, limit.total_s, False),
        ):
            seconds = min(inf if requested is None else requested, inf if most is None else most)
            if seconds < inf:
                heappush(self._heap, (request.arrival_s + seconds, request.id, is_queue))
                self.next_s = self._heap[0][0]

    def due(self, now_s: float) -> list[tuple[str, bool]]:
        """Request ids whose deadline has passed, each with whether it was the queue's."""
        found: list[tuple[str, bool]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id, is_queue = heappop(self._heap)
            found.append((request_id, is_queue))
        self.next_s = self._heap[0][0] if self._heap else inf
        return found
