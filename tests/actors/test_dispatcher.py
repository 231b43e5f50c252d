"""Which replica gets which message."""

from math import inf

import pytest

from runtime.actors.channels import Channel, Listeners
from runtime.actors.dispatcher import Dispatcher
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import Abort, Arrive, Stopped, ToScheduler, Unload

pytestmark = pytest.mark.anyio


def arrive(id: str) -> Arrive:
    return Arrive(Request(id=id, prompt_ids=[1], params=SamplingParams(), seed=1, arrival_s=0.0))


async def test_requests_in_turn_and_what_follows_to_the_same() -> None:
    inboxes, closed = [Channel[ToScheduler](inf) for _ in range(2)], Listeners[str]()
    dispatcher = Dispatcher(inboxes, closed)
    for name in "abc":
        dispatcher.send(arrive(name))
    dispatcher.send(Abort("b"))
    dispatcher.send(Abort("never seen"))
    dispatcher.send(Stopped([0, 1, 4]))
    dispatcher.unload(7)
    closed.notify("a")
    dispatcher.send(Abort("a"))  # it has ended
    assert await inboxes[0].drain() == [arrive("a"), arrive("c"), Stopped([0, 4]), Unload(7)]
    assert await inboxes[1].drain() == [arrive("b"), Abort("b"), Stopped([1]), Unload(7)]
    for inbox in inboxes:
        inbox.discard()
