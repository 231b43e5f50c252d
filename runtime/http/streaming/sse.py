"""Server-sent events: how a payload becomes an event, and events become a chunk of an HTTP/1.1 body."""

import msgspec

from runtime.http.streaming.rows import encode_rows
from runtime.json_value import Fields

encode = msgspec.json.Encoder(enc_hook=encode_rows).encode

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream otherwise
]


def event(payload: object) -> bytes:
    """One event with `payload` as JSON."""
    return b"data: " + encode(payload) + b"\n\n"


def chunked(data: bytes) -> bytes:
    """Non-empty `data` as one chunk of a chunked body (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def typed_events(payloads: list[Fields]) -> bytes:
    """Payloads as events that have their `type` as event name, as in OpenAI's Responses and Anthropic's
    API."""
    return b"".join(
        [b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), encode(payload)) for payload in payloads]
    )
