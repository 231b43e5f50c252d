"""Traces of requests, by OpenTelemetry to a collector (OTLP over gRPC): --enable-trace.

    request                 from arrival to the end; a child of the span that the client's traceparent names
      media.fetch           each file: until its bytes were there
      media.decode          each file
      tokenize              files prepared, template, tokens; what came after the last file
      first_token           from the scheduler's queue to the first token, with the encoder's seconds
      generate              from the first token to the last

Spans are made when a request has ended, from its record, and sent by a thread of OpenTelemetry's. A collector
that does not answer costs spans, never requests.
"""

import re
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING

from runtime import __version__
from runtime.errors import OptionsError, install_line
from runtime.metrics.request_records import Record

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # W3C Trace Context, version 00
CLOSE_S = 2.0  # the longest wait for the last spans, where the server's end has time for it

Stage = tuple[str, float, float, dict[str, str | int | float]]  # name, begin and end (monotonic), attributes


class RequestTraces:
    """Makes the spans of each request that has ended."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("runtime", __version__)

    def began(self, record: Record) -> None:
        """Does nothing."""

    def ended(self, record: Record) -> None:
        """Ends the spans of a request: they go to a queue, and wait for nothing."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        def unix_ns(at_s: float) -> int:
            return int((record.began_at + at_s - record.began_s) * 1e9)

        assert record.ended_s is not None
        span = self._tracer.start_span(
            "request",
            context=parent_of(record.request.traceparent),
            kind=SpanKind.SERVER,
            start_time=unix_ns(record.request.arrival_s),
            attributes=attributes_of(record),
        )
        inside = set_span_in_context(span)
        for name, begin_s, end_s, attributes in stages_of(record):
            part = self._tracer.start_span(
                name, context=inside, start_time=unix_ns(begin_s), attributes=attributes
            )
            part.end(unix_ns(end_s))
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(unix_ns(record.ended_s))

    def close(self, within_s: float) -> None:
        """Sends the spans that wait, for a short time at most. Blocking."""
        # OpenTelemetry tries longer than the server's end may take, where a collector does not answer
        last = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        last.start()
        last.join(max(min(within_s, CLOSE_S), 0.0))


def attributes_of(record: Record) -> Mapping[str, str | int]:
    """Attributes of a request: its id, tokens and reasons, by OpenTelemetry's conventions for generative AI
    where these have a name."""
    attributes: dict[str, str | int] = {
        "gen_ai.response.id": record.request.id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "runtime.cached_tokens": record.cached_tokens,
        "runtime.finish_reasons": ",".join(record.reasons),
    }
    if record.media is not None:
        attributes |= {f"runtime.{kind.value}_tokens": count for kind, count in record.media.tokens.items()}
    return attributes


def stages_of(record: Record) -> Iterator[Stage]:
    """The parts of a request that its record knows, in order."""
    begin_s = record.request.arrival_s
    for kind, load in record.loads:
        attributes: dict[str, str | int | float] = {"kind": kind.value, "bytes": load.num_bytes}
        yield "media.fetch", load.begin_s, load.fetched_s, attributes
        yield "media.decode", load.decode_s, load.end_s, attributes
        begin_s = max(begin_s, load.end_s)
    if record.tokenized_s is None:
        return
    yield "tokenize", begin_s, record.tokenized_s, {"known_files": record.known_files}
    assert record.ended_s is not None
    first_s = record.ended_s if record.first_s is None else record.first_s
    encoder: dict[str, str | int | float] = {}
    if (media := record.media) is not None:
        encoder = {"encoded": media.num_encoded, "cached": media.num_inputs - media.num_encoded}
        encoder["encode_seconds"] = media.encode_s
    yield "first_token", record.tokenized_s, first_s, encoder
    if record.first_s is not None:
        yield "generate", record.first_s, record.ended_s, {}


def parent_of(traceparent: str) -> "Context | None":
    """The context of the client's span; None: it named none, or in another form than W3C's."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if (found := TRACEPARENT.fullmatch(traceparent)) is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(context)) if context.is_valid else None


def open_traces(endpoint: str) -> RequestTraces:
    """Traces to the collector at `endpoint`: host:port, or with https:// for TLS. Raises OptionsError."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise OptionsError([f"--enable-trace needs OpenTelemetry: {install_line('trace')}"]) from None

    scheme, separator, _ = endpoint.partition("://")
    if separator and scheme not in ("http", "https"):
        raise OptionsError(
            ["--otlp-traces-endpoint must be host:port of a collector that takes OTLP over gRPC"]
        )
    url = endpoint if separator else f"http://{endpoint}"
    resource = Resource.create({"service.name": "runtime", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, insecure=scheme != "https")))
    return RequestTraces(provider)
