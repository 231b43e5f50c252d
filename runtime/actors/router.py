"""The front door: takes requests in, one place that owns abort.

Knows the open requests (runtime/actors/open_requests.py) and nothing of tokens, steps or text.
"""

from collections.abc import Callable

import anyio

from runtime.actors.channels import Channel
from runtime.actors.open_requests import Outputs
from runtime.errors import InvalidRequest, Overloaded, RequestError
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.scheduler import Abort, ToScheduler


class Router:
    """Not a task: its methods are called on the event loop and return at once.

    `check_open` raises Unavailable or Overloaded when no request may come in now (loading, draining, queue
    full). `to_scheduler` must take a message without waiting or raising: an Abort is never lost.
    """

    def __init__(
        self,
        outputs: Outputs,
        tokenizer: Channel[GenerateRequest],
        to_scheduler: Callable[[ToScheduler], None],
        *,
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._outputs = outputs
        self._tokenizer = tokenizer
        self._to_scheduler = to_scheduler
        self._check_open = check_open

    @property
    def num_open(self) -> int:
        """Requests that have not ended: tokenising, waiting and running."""
        return len(self._outputs)

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request in; its output goes to `sink`, which hears nothing when this raises.

        Raises what `check_open` raises, InvalidRequest when a request of this id is open, Overloaded when the
        tokenizer is behind.
        """
        self._check_open()
        self._outputs.open(request.id, sink, request)
        try:
            self._tokenizer.send_nowait(request)
        except anyio.WouldBlock:
            self._outputs.close(request.id)
            raise Overloaded("too many requests are waiting to be tokenised; try again later") from None

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink hears nothing from now on. Unknown and finished ids are ignored."""
        if self._outputs.close(request_id) is not None:
            self._to_scheduler(Abort(request_id))

    def cancel(self, matches: Callable[[str], bool], is_scheduled: Callable[[str], bool]) -> int:
        """Ends requests by an operator's word: unlike those that left, their clients are told. -> how many

        What the scheduler knows ends with the tokens that it has, in its Ended; what it does not know yet has
        none, and is refused.
        """
        request_ids = [request_id for request_id in self._outputs.ids if matches(request_id)]
        for request_id in request_ids:
            if not is_scheduled(request_id):
                self._outputs.fail(
                    request_id, InvalidRequest("the request was aborted by the operator before it began")
                )
            self._to_scheduler(Abort(request_id))
        return len(request_ids)

    def fail_all(self, error: RequestError) -> int:
        """Ends all open requests with `error`; the scheduler is not told (it is gone, or will be). -> how
        many there were"""
        return self._outputs.fail_all(error)
