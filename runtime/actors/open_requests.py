"""The open requests of one runtime, and the sink of each. The actor that takes a request out of here ends it,
so that it ends once.

    router       opens; closes on abort (the sink gets nothing more)
    tokenizer    fails requests that cannot be tokenised
    detokenizer  closes finished requests; fails those that the scheduler refused
"""

from collections import Counter

import anyio

from runtime.actors.channels import Listeners
from runtime.errors import InvalidRequest, RequestError
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.tenants import DEFAULT_TENANT, Tenant


class OpenRequests:
    """Sinks by request id. Lives on the event loop; every method is synchronous."""

    def __init__(self, closed: Listeners[str] | None = None) -> None:
        """`closed` is notified with the id of each request that leaves, before `close` returns."""
        self.closed = Listeners[str]() if closed is None else closed
        self._sinks: dict[str, Sink] = {}
        self._is_empty: anyio.Event | None = None  # while `wait_empty` waits
        # id() of the submitted object: a request id may be used again before its first object has left a
        # queue
        self._submitted: dict[str, int] = {}
        self._owners: dict[str, str] = {}  # names of the tenants by request id
        self._num_by_owner = Counter[str]()

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sinks

    def ids(self, tenant: Tenant = DEFAULT_TENANT) -> list[str]:
        """Ids of the open requests that exist for `tenant`, oldest first."""
        if tenant.sees_all:
            return list(self._sinks)
        return [request_id for request_id in self._sinks if tenant.sees(self._owners.get(request_id, ""))]

    def open(self, request_id: str, sink: Sink, request: GenerateRequest | None = None) -> None:
        """Adds a request. Raises InvalidRequest when a request with this id is open."""
        if request_id in self._sinks:
            raise InvalidRequest(
                "a request with this id is running; choose another id or wait for its end", param="id"
            )
        self._sinks[request_id] = sink
        if request is not None:
            self._submitted[request_id] = id(request)
            self._owners[request_id] = request.tenant.name
            self._num_by_owner[request.tenant.name] += 1

    def owner(self, request_id: str) -> str:
        """The name of an open request's tenant; "" for one that is not open."""
        return self._owners.get(request_id, "")

    def num_of(self, tenant: Tenant) -> int:
        """How many open requests a tenant has."""
        return self._num_by_owner[tenant.name]

    def awaits(self, request_id: str, request: object) -> bool:
        """Whether the request is open and was opened with this very object."""
        return request_id in self._sinks and self._submitted.get(request_id, id(request)) == id(request)

    def find(self, request_id: str) -> Sink | None:
        """The sink of an open request; None when it is not open."""
        return self._sinks.get(request_id)

    def close(self, request_id: str) -> Sink | None:
        """Takes a request out. -> its sink, for the caller to end; None when it is not open"""
        sink = self._sinks.pop(request_id, None)
        self._submitted.pop(request_id, None)
        if (owner := self._owners.pop(request_id, None)) is not None:
            self._num_by_owner[owner] -= 1
            if not self._num_by_owner[owner]:
                del self._num_by_owner[owner]
        if sink is not None:
            self.closed.notify(request_id)
            if self._is_empty is not None and not self._sinks:
                self._is_empty.set()
        return sink

    async def wait_empty(self) -> None:
        """Returns when no request is open."""
        if self._sinks:
            self._is_empty = anyio.Event()
            await self._is_empty.wait()

    def fail(self, request_id: str, error: RequestError) -> bool:
        """Ends a request with an error. -> whether it was open"""
        sink = self.close(request_id)
        if sink is not None:
            sink.fail(error)
        return sink is not None

    def fail_all(self, error: RequestError) -> int:
        """Ends all open requests with an error. -> how many there were"""
        return sum(self.fail(request_id, error) for request_id in list(self._sinks))
