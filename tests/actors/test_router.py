"""The router: requests in, aborts out."""

import pytest

from runtime.actors.channels import Channel
from runtime.actors.open_requests import OpenRequests
from runtime.actors.router import Router
from runtime.errors import InvalidRequest, Overloaded, Unavailable
from runtime.messages.requests import GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import Abort, ToScheduler
from tests.actors.sink import ListSink

pytestmark = pytest.mark.anyio


def request(id: str) -> GenerateRequest:
    return GenerateRequest(id=id, prompt=Tokens([1]), params=SamplingParams(), arrival_s=0.0)


async def test_requests_go_to_the_tokenizer_and_aborts_to_the_scheduler() -> None:
    open_requests, channel, sent = OpenRequests(), Channel[GenerateRequest](8), list[ToScheduler]()
    router = Router(open_requests, channel, sent.append)
    sink = ListSink()
    router.submit(request("a"), sink)
    assert router.num_open == 1 and await channel.drain() == [request("a")]
    router.abort("a")
    router.abort("a")
    router.abort("never seen")
    assert router.num_open == 0 and sent == [Abort("a")]
    assert not open_requests.fail("a", Unavailable("late")) and sink.errors == [] and sink.deltas == []
    channel.discard()


async def test_refusals_leave_no_trace() -> None:
    open_requests, channel, sent = OpenRequests(), Channel[GenerateRequest](1), list[ToScheduler]()
    router = Router(open_requests, channel, sent.append)
    router.submit(request("a"), ListSink())
    with pytest.raises(InvalidRequest):
        router.submit(request("a"), ListSink())
    with pytest.raises(Overloaded):
        router.submit(request("b"), ListSink())
    assert router.num_open == 1 and "b" not in open_requests and sent == []
    channel.discard()


async def test_a_closed_router() -> None:
    def closed() -> None:
        raise Unavailable("loading")

    channel = Channel[GenerateRequest](1)
    router = Router(OpenRequests(), channel, lambda message: None, check_open=closed)
    with pytest.raises(Unavailable):
        router.submit(request("a"), ListSink())
    assert router.num_open == 0 and channel.statistics.sent == 0
    channel.discard()


async def test_fail_all_is_the_last_word() -> None:
    open_requests, channel = OpenRequests(), Channel[GenerateRequest](8)
    router = Router(open_requests, channel, lambda message: None)
    sinks = [ListSink(), ListSink()]
    for i, sink in enumerate(sinks):
        router.submit(request(str(i)), sink)
    error = Unavailable("a rank died")
    assert router.fail_all(error) == 2 and router.fail_all(error) == 0
    router.abort("0")
    assert [sink.errors for sink in sinks] == [[error], [error]]
    channel.discard()
