"""Open requests: in once, out once."""

import pytest

from runtime.actors.open_requests import Outputs
from runtime.errors import InvalidRequest, Unavailable
from tests.actors.sink import ListSink


def test_a_request_leaves_once() -> None:
    outputs, sink, left = Outputs(), ListSink(), list[str]()
    outputs.on_close(left.append)
    outputs.open("a", sink)
    assert len(outputs) == 1 and "a" in outputs and outputs.find("a") is sink
    assert outputs.close("a") is sink
    assert outputs.close("a") is None and outputs.find("a") is None and left == ["a"]
    assert not outputs.fail("a", Unavailable("gone")) and sink.errors == []


def test_ids_are_unique_while_open() -> None:
    outputs, first, second = Outputs(), ListSink(), ListSink()
    outputs.open("a", first)
    with pytest.raises(InvalidRequest) as refused:
        outputs.open("a", second)
    assert refused.value.param == "id" and outputs.find("a") is first
    outputs.close("a")
    outputs.open("a", second)
    assert outputs.find("a") is second


def test_fail_all_reaches_each_open_request_once() -> None:
    outputs, sinks = Outputs(), [ListSink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        outputs.open(str(i), sink)
    outputs.close("1")
    error = Unavailable("the server is stopping")
    assert outputs.fail_all(error) == 2 and outputs.fail_all(error) == 0
    assert [sink.errors for sink in sinks] == [[error], [], [error]]
