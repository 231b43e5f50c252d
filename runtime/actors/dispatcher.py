"""Which replica serves which request: each request goes to one, in turn, and what follows goes to the same
one.

Sequence ids are unique across replicas: `id % number of replicas` is the replica's index (Scheduler.add).
"""

from collections.abc import Sequence

from runtime.actors.channels import Channel, Listeners
from runtime.messages.scheduler import Abort, Arrive, Stopped, ToScheduler, Unload


class Dispatcher:
    """Sends messages about requests to the scheduler that has them. Its methods return at once and lose no
    message."""

    def __init__(self, inboxes: Sequence[Channel[ToScheduler]], closed: Listeners[str]) -> None:
        """`inboxes`: one unbounded channel for each replica, in order of their indices; `closed`: ids of
        requests that have ended."""
        self._inboxes = inboxes
        self._replicas: dict[str, int] = {}  # replica index by request id
        self._next = 0  # replica of the next request
        closed.subscribe(self._forget)

    def send(self, message: Arrive | Abort | Stopped) -> None:
        """An Arrive goes to the next replica, round robin; an Abort to the request's replica, if it has one;
        Stopped to the replicas of its sequences."""
        match message:
            case Arrive(request=request):
                index = self._replicas[request.id] = self._next
                self._next = (index + 1) % len(self._inboxes)
                self._inboxes[index].send_nowait(message)
            case Abort(request_id=request_id):
                if (known := self._replicas.get(request_id)) is not None:
                    self._inboxes[known].send_nowait(message)
            case Stopped(sequence_ids=ids):
                self._send_stopped(ids)

    def unload(self, adapter: int) -> None:
        """No request has this adapter any more: all replicas may forget it."""
        for inbox in self._inboxes:
            inbox.send_nowait(Unload(adapter))

    def _send_stopped(self, sequence_ids: list[int]) -> None:
        by_replica: dict[int, list[int]] = {}
        for sequence_id in sequence_ids:
            by_replica.setdefault(sequence_id % len(self._inboxes), []).append(sequence_id)
        for index, ids in by_replica.items():
            self._inboxes[index].send_nowait(Stopped(ids))

    def _forget(self, request_id: str) -> None:
        self._replicas.pop(request_id, None)
