"""Which replica gets which message."""

import pytest

from runtime.actors.channels import Channel, Listeners
from runtime.actors.dispatcher import Dispatcher
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import Abort, Arrive, Stopped, ToScheduler, Unload
from tests.scheduling.test_balance import View

pytestmark = pytest.mark.anyio


def arrive(id: str) -> Arrive:
    return Arrive(Request(id=id, prompt_ids=[1], params=SamplingParams(), seed=1, arrival_s=0.0))


def two() -> tuple[list[Channel[ToScheduler]], Listeners[str], Dispatcher]:
    closed, views = Listeners[str](), [View(), View()]
    dispatcher = Dispatcher(2, "round_robin", closed, lambda: views)
    return dispatcher.inboxes, closed, dispatcher


async def test_requests_in_turn_and_what_follows_to_the_same() -> None:
    inboxes, closed, dispatcher = two()
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


async def test_what_a_replica_has_handed_over_finds_its_way() -> None:
    """An Abort goes to the replica that has the request now; what was under way already, and Stopped, which
    goes by the replica that made the sequence, are forwarded, once."""
    inboxes, closed, dispatcher = two()
    for name in "ab":
        dispatcher.send(arrive(name))
    dispatcher.forward(Abort("a"), 0)  # nothing was handed over
    assert dispatcher.may_move("a") and not dispatcher.may_move("never seen")
    dispatcher.move("a", 1)
    assert not dispatcher.may_move("a"), "ranks may have died of it"
    assert dispatcher.may_move("a", is_suspect=False), "a node was lost, which is no request's doing"
    assert [dispatcher.held_tokens(i) > 0 for i in (0, 1)] == [False, True]
    dispatcher.send(Abort("a"))
    dispatcher.send(Stopped([0]))
    assert await inboxes[0].drain() == [arrive("a"), Stopped([0])]
    dispatcher.forward(Stopped([0]), 0)
    dispatcher.forward(Stopped([0], is_forwarded=True), 0)
    dispatcher.forward(Stopped([1]), 1)  # it has handed nothing over
    moved = [arrive("b"), Abort("a"), Stopped([0], is_forwarded=True)]
    assert await inboxes[1].drain() == moved
    closed.notify("a")
    assert dispatcher.held_tokens(0) == 0
    for inbox in inboxes:
        inbox.discard()
