"""Open requests: in once, out once."""

import pytest

from runtime.actors.open_requests import OpenRequests
from runtime.errors import InvalidRequest, Unavailable
from tests.actors.sink import ListSink


def test_a_request_leaves_once() -> None:
    open_requests, sink, left = OpenRequests(), ListSink(), list[str]()
    open_requests.closed.subscribe(left.append)
    open_requests.open("a", sink)
    assert len(open_requests) == 1 and "a" in open_requests and open_requests.find("a") is sink
    assert open_requests.close("a") is sink
    assert open_requests.close("a") is None and open_requests.find("a") is None and left == ["a"]
    assert not open_requests.fail("a", Unavailable("gone")) and sink.errors == []


def test_ids_are_unique_while_open() -> None:
    open_requests, first, second = OpenRequests(), ListSink(), ListSink()
    open_requests.open("a", first)
    with pytest.raises(InvalidRequest) as refused:
        open_requests.open("a", second)
    assert refused.value.param == "id" and open_requests.find("a") is first
    open_requests.close("a")
    open_requests.open("a", second)
    assert open_requests.find("a") is second


def test_fail_all_reaches_each_open_request_once() -> None:
    open_requests, sinks = OpenRequests(), [ListSink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        open_requests.open(str(i), sink)
    open_requests.close("1")
    error = Unavailable("the server is stopping")
    assert open_requests.fail_all(error) == 2 and open_requests.fail_all(error) == 0
    assert [sink.errors for sink in sinks] == [[error], [], [error]]
