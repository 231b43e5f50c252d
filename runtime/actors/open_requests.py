"""The open requests of one runtime: where the output of each goes. Whoever takes a request out of here ends
it, so it ends once.

    router       opens; closes on abort          (the sink hears nothing more)
    tokenizer    fails what cannot be tokenised
    detokenizer  closes what has finished; fails what the scheduler refused
"""

from collections.abc import Callable

from runtime.errors import InvalidRequest, RequestError
from runtime.messages.requests import Sink


class Outputs:
    """Sinks by request id. Lives on the event loop; every method is synchronous."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}
        # id() of the submitted object: a request id may be used again before its first object has left a queue
        self._submitted: dict[str, int] = {}
        self._listeners: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sinks

    @property
    def ids(self) -> list[str]:
        """Of the open requests, oldest first."""
        return list(self._sinks)

    def open(self, request_id: str, sink: Sink, request: object = None) -> None:
        """Raises InvalidRequest when a request of this id is open."""
        if request_id in self._sinks:
            raise InvalidRequest(
                "a request with this id is running; choose another id or wait for its end", param="id"
            )
        self._sinks[request_id] = sink
        if request is not None:
            self._submitted[request_id] = id(request)

    def awaits(self, request_id: str, request: object) -> bool:
        """Whether the request is open, and was opened with this object, which is still alive."""
        return request_id in self._sinks and self._submitted.get(request_id, id(request)) == id(request)

    def find(self, request_id: str) -> Sink | None:
        return self._sinks.get(request_id)

    def on_close(self, listener: Callable[[str], None]) -> None:
        """`listener(request_id)` is called whenever a request leaves, before `close` returns."""
        self._listeners.append(listener)

    def close(self, request_id: str) -> Sink | None:
        """Takes a request out. -> its sink, for the caller to end; None when it is not open (any more)"""
        sink = self._sinks.pop(request_id, None)
        self._submitted.pop(request_id, None)
        if sink is not None:
            for listener in self._listeners:
                listener(request_id)
        return sink

    def fail(self, request_id: str, error: RequestError) -> bool:
        """Ends a request with an error. -> whether it was open"""
        sink = self.close(request_id)
        if sink is not None:
            sink.fail(error)
        return sink is not None

    def fail_all(self, error: RequestError) -> int:
        """Ends all open requests with an error. -> how many there were"""
        return sum(self.fail(request_id, error) for request_id in list(self._sinks))
