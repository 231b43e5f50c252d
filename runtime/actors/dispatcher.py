"""Which replica serves which request: each request goes to one, which scheduling/balance.py chooses, and what
follows goes to the same one. A replica whose ranks die hands its requests to others (`move`).

Sequence ids are unique across replicas: `id % number of replicas` is the index of the replica that made the
sequence (Scheduler.add). What is said about a sequence goes there, and from there to all others where it was
moved.
"""

from collections.abc import Callable, Sequence
from math import inf

from runtime.actors.channels import Channel, Listeners
from runtime.messages.balance import BalanceMethod
from runtime.messages.scheduler import Abort, Arrive, Stopped, ToScheduler, Unload
from runtime.scheduling.balance import Balance, ReplicaView


class Dispatcher:
    """Sends messages about requests to the scheduler that has them. Its methods return at once and lose no
    message."""

    def __init__(
        self,
        num_replicas: int,
        method: BalanceMethod,
        closed: Listeners[str],
        views: Callable[[], Sequence[ReplicaView]],
    ) -> None:
        """`method`: of spreading requests; `closed`: ids of requests that have ended; `views` gives the
        replicas."""
        # of each replica; bounded by --max-queued-requests, which the router checks
        self.inboxes = [Channel[ToScheduler](inf) for _ in range(num_replicas)]
        self._balance = Balance(method, num_replicas)
        self._views = views
        self._moved: set[str] = set()  # open requests that were moved because ranks had died of them, perhaps
        self._movers: set[int] = set()  # replicas that have ever handed requests to others
        closed.subscribe(self._forget)

    def send(self, message: Arrive | Abort | Stopped) -> None:
        """An Arrive goes to the replica that is chosen for it; an Abort to the request's replica, if it has
        one; Stopped to the replicas that made the sequences."""
        match message:
            case Arrive(request=request):
                self.inboxes[self._balance.choose(request, self._views())].send_nowait(message)
            case Abort(request_id=request_id):
                if (known := self._balance.replica(request_id)) is not None:
                    self.inboxes[known].send_nowait(message)
            case Stopped(sequence_ids=ids):
                by_replica: dict[int, list[int]] = {}
                for sequence_id in ids:
                    by_replica.setdefault(sequence_id % len(self.inboxes), []).append(sequence_id)
                for index, own in by_replica.items():
                    self.inboxes[index].send_nowait(Stopped(own))

    def unload(self, adapter: int) -> None:
        """No request has this adapter any more: all replicas may forget it."""
        for inbox in self.inboxes:
            inbox.send_nowait(Unload(adapter))

    def may_move(self, request_id: str, *, is_suspect: bool = True) -> bool:
        """Whether a request may go to another replica: an open one may do so once, if ranks may have died of
        it (`is_suspect`), and any number of times if they were lost with their node."""
        is_open = self._balance.replica(request_id) is not None
        return is_open and not (is_suspect and request_id in self._moved)

    def held_tokens(self, index: int) -> int:
        """What is open on a replica, in tokens."""
        return self._balance.held[index].tokens

    def move(self, request_id: str, index: int, *, is_suspect: bool = True) -> None:
        """A request is another replica's from now on. `is_suspect`: as in `may_move`."""
        source = self._balance.replica(request_id)
        assert source is not None, "only open requests move"
        self._movers.add(source)
        if is_suspect:
            self._moved.add(request_id)
        self._balance.move(request_id, index)

    def forward(self, message: Abort | Stopped, index: int) -> None:
        """Replica `index` knows nothing of what this message is about. Where it has handed requests to
        others, they get the message."""
        if index not in self._movers or message.is_forwarded:
            return
        onward: Abort | Stopped = (
            Abort(message.request_id, is_forwarded=True)
            if isinstance(message, Abort)
            else Stopped(message.sequence_ids, is_forwarded=True)
        )
        for other, inbox in enumerate(self.inboxes):
            if other != index:
                inbox.send_nowait(onward)

    def _forget(self, request_id: str) -> None:
        self._balance.close(request_id)
        self._moved.discard(request_id)
