"""The router: takes requests in, and is the one place that aborts them.

Knows the open requests (actors/open_requests.py) and nothing of tokens, steps or text.
"""

from collections.abc import Callable

import anyio

from runtime.actors.channels import Channel
from runtime.actors.open_requests import OpenRequests
from runtime.errors import InvalidRequest, Overloaded, RequestError
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.scheduler import Abort
from runtime.messages.tenants import DEFAULT_TENANT, Tenant


class Router:
    """Not a task: its methods are called on the event loop and return at once."""

    def __init__(
        self,
        open_requests: OpenRequests,
        tokenizer: Channel[GenerateRequest],
        to_scheduler: Callable[[Abort], None],
        *,
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        """`to_scheduler` must take a message without waiting or raising: an Abort is never lost. `check_open`
        raises Unavailable or Overloaded when no request may come in now (loading, draining, queue full)."""
        self._open_requests = open_requests
        self._tokenizer = tokenizer
        self._to_scheduler = to_scheduler
        self._check_open = check_open

    @property
    def num_open(self) -> int:
        """Requests that have not ended: being tokenised, waiting and running."""
        return len(self._open_requests)

    def open_ids(self, tenant: Tenant = DEFAULT_TENANT) -> list[str]:
        """Ids of the requests of `tenant` that have not ended, oldest first."""
        return self._open_requests.ids(tenant)

    def owner(self, request_id: str) -> str:
        """The name of the tenant of an open request; "" for one that is not open."""
        return self._open_requests.owner(request_id)

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request in; its output goes to `sink`, which gets nothing when this raises.

        Raises what `check_open` raises, InvalidRequest when a request with this id is open, Overloaded when
        the tokenizer is behind.
        """
        self._check_open()
        self._open_requests.open(request.id, sink, request)
        try:
            self._tokenizer.send_nowait(request)
        except anyio.WouldBlock:
            self._open_requests.close(request.id)
            raise Overloaded("too many requests are waiting to be tokenised; try again later") from None

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink gets nothing from now on. Unknown and finished ids are ignored."""
        if request_id in self._open_requests:
            self._to_scheduler(Abort(request_id))  # before `close`, which forgets the request's replica
            self._open_requests.close(request_id)

    def fail(self, request_id: str, error: RequestError) -> None:
        """Ends a request with `error`. Unknown and finished ids are ignored."""
        if request_id in self._open_requests:
            self._to_scheduler(Abort(request_id))  # before `fail`, which forgets the request's replica
            self._open_requests.fail(request_id, error)

    def cancel(
        self,
        matches: Callable[[str], bool],
        is_scheduled: Callable[[str], bool],
        tenant: Tenant = DEFAULT_TENANT,
    ) -> int:
        """Ends requests of `tenant` by a command; unlike with `abort`, their clients are informed. -> how
        many

        A request that the scheduler knows ends with the tokens that it has, in its Ended. One that has not
        reached the scheduler has none, and is refused.
        """
        request_ids = [request_id for request_id in self._open_requests.ids(tenant) if matches(request_id)]
        for request_id in request_ids:
            self._to_scheduler(Abort(request_id))
            if not is_scheduled(request_id):
                self._open_requests.fail(
                    request_id, InvalidRequest("the request was aborted by the operator before it began")
                )
        return len(request_ids)

    def fail_all(self, error: RequestError) -> int:
        """Ends all open requests with `error`; the scheduler gets no message (it is gone, or will be). -> how
        many there were"""
        return self._open_requests.fail_all(error)
