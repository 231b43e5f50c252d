"""Traces of requests, as a collector gets them over OTLP: a gRPC server that keeps what it is sent."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, time
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from starlette.datastructures import Headers

from runtime.errors import OptionsError
from runtime.http.fields.headers import read_headers
from runtime.media_kind import MediaKind
from runtime.messages.media import MediaLoad, MediaUsage
from runtime.messages.requests import GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.metrics.request_records import Record
from runtime.metrics.traces import open_traces
from tests.test_core import ask, running, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.service = ""
        self.spans: list[Any] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for part in request.resource_spans:
            self.service = values(part.resource.attributes)["service.name"]
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> Any:
        (span,) = [one for one in self.spans if one.name == name]
        return span


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def record(now_s: float, traceparent: str = PARENT) -> Record:
    """A request that came five seconds ago with an image."""
    request = GenerateRequest(
        id="r", prompt=Tokens([1]), params=SamplingParams(), arrival_s=now_s - 5, traceparent=traceparent
    )
    one = Record(request, began_at=1000.0, began_s=now_s - 5)
    one.loads = [(MediaKind.IMAGE, MediaLoad(77, now_s - 4.5, now_s - 4, now_s - 3.75, now_s - 3.5))]
    one.tokenized_s, one.first_s, one.ended_s = now_s - 3, now_s - 2, now_s
    one.prompt_tokens, one.completion_tokens, one.reasons = 9, 3, ["stop"]
    one.media = MediaUsage({MediaKind.IMAGE: 4}, {MediaKind.IMAGE: 0}, 1, 1, 0.25)
    return one


def test_the_parts_of_a_request() -> None:
    with collecting() as (collector, endpoint):
        traces = open_traces(endpoint)
        traces.ended(record(monotonic()))
        traces.close(5.0)
    whole = collector.named("request")
    trace_id, parent_id = (bytes.fromhex(part) for part in PARENT.split("-")[1:3])
    assert (whole.trace_id, whole.parent_span_id, collector.service) == (trace_id, parent_id, "runtime")
    found = {}
    for span in collector.spans:
        assert span.trace_id == trace_id and (span is whole or span.parent_span_id == whole.span_id)
        found[span.name] = [
            round(ns / 1e9 - 1000, 2) for ns in (span.start_time_unix_nano, span.end_time_unix_nano)
        ]
    assert found == {
        "request": [0, 5],
        "media.fetch": [0.5, 1],
        "media.decode": [1.25, 1.5],
        "tokenize": [1.5, 2],
        "first_token": [2, 3],
        "generate": [3, 5],
    }
    assert values(collector.named("media.decode").attributes) == {"kind": "image", "bytes": 77}
    encoder = values(collector.named("first_token").attributes)
    assert encoder == {"encoded": 1, "cached": 0, "encode_seconds": 0.25}
    tokens = values(whole.attributes)
    assert (tokens["gen_ai.usage.input_tokens"], tokens["runtime.image_tokens"]) == (9, 4)


def test_the_log_of_a_request_has_the_same() -> None:
    assert record(monotonic()).metrics()["media"] == {
        "known_files": 0,
        "bytes": 77,
        "fetch_s": pytest.approx(0.5),
        "decode_s": pytest.approx(0.25),
        "image_tokens": 4,
        "encoded": 1,
        "cached": 0,
        "encode_s": 0.25,
    }


@pytest.mark.parametrize(
    "header", ["", "00-1-2-01", PARENT.upper(), "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x" * 999]
)
def test_a_header_of_another_form_begins_a_new_trace(header: str) -> None:
    traceparent = read_headers(Headers({"traceparent": header})).traceparent
    with collecting() as (collector, endpoint):
        traces = open_traces(endpoint)
        traces.ended(record(monotonic(), traceparent))
        traces.close(5.0)
    assert collector.named("request").parent_span_id == b""


@pytest.mark.anyio
async def test_a_server_sends_what_it_has_served() -> None:
    with collecting() as (collector, endpoint):
        async with running(enable_trace=True, otlp_traces_endpoint=endpoint) as core:
            before = time()
            sink = ask(core, "one", max_new_tokens=3)
            await until(lambda: sink.finishes)
            gone = ask(core, "gone", max_new_tokens=1000)
            await until(lambda: gone.token_ids())
            core.abort("gone")
        whole, left = sorted(
            [one for one in collector.spans if one.name == "request"],
            key=lambda one: one.start_time_unix_nano,
        )
        assert values(whole.attributes)["gen_ai.response.id"] == "one"
        assert values(left.attributes)["runtime.finish_reasons"] == "abort"
        assert before - 1 < whole.start_time_unix_nano / 1e9 <= whole.end_time_unix_nano / 1e9 < time() + 1
        assert {one.name for one in collector.spans} == {"request", "tokenize", "first_token", "generate"}


def test_a_collector_that_is_not_there_costs_spans_only() -> None:
    traces = open_traces("127.0.0.1:9")
    begin_s = monotonic()
    traces.ended(record(begin_s))
    assert monotonic() - begin_s < 5.0
    traces.close(0.2)
    assert 0.2 <= monotonic() - begin_s < 8.0, "an export waits for ten seconds"


def test_endpoints_are_checked() -> None:
    with pytest.raises(OptionsError, match="--otlp-traces-endpoint must be host:port"):
        open_traces("ftp://a:1")
