"""Request headers with a meaning here: routing key, replica, time limits, trace, half. The tenant's is in
http/auth.py."""

from math import isfinite

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers

from runtime.errors import InvalidRequest
from runtime.messages.transfer import Transfer
from runtime.transfer.key import HEADER as TRANSFER
from runtime.transfer.key import parse_header

ROUTING_KEYS = ("x-routing-key", "x-smg-routing-key")  # ours, and that of SGLang's gateway
TIMEOUT = "x-request-timeout"  # seconds, from arrival to the end
QUEUE_TIMEOUT = "x-queue-timeout"  # seconds, from arrival to the first step
TRACEPARENT = "traceparent"  # W3C Trace Context
REPLICA = "x-data-parallel-rank"  # index of a replica
MAX_CHARS = 256


class LabelHeader(Struct, frozen=True):
    """The header with labels for metrics, and the names that it may use."""

    name: str
    allowed: tuple[str, ...]


class RequestHeaders(Struct, frozen=True):
    """Fields of a GenerateRequest that come from headers."""

    routing_key: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    replica: int | None = None
    transfer: Transfer | None = None
    traceparent: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    bearer: bytes = b""  # of `authorization`, for a Transfer whose room the body names


def read_headers(headers: Headers, label_header: LabelHeader | None = None) -> RequestHeaders:
    """The fields that `headers` set. `label_header`: None: no request has labels. Raises InvalidRequest,
    naming the header."""
    routing_key = next((name for header in ROUTING_KEYS if (name := _name(headers, header))), "")
    return RequestHeaders(
        routing_key,
        _seconds(headers, TIMEOUT),
        _seconds(headers, QUEUE_TIMEOUT),
        _index(headers, REPLICA),
        None if (half := headers.get(TRANSFER)) is None else parse_header(half),
        _traceparent(headers),
        () if label_header is None else _labels(headers, label_header),
        _bearer(headers),
    )


def _traceparent(headers: Headers) -> str:
    """The header `traceparent` of W3C Trace Context; one of another form counts as none."""
    value = headers.get(TRACEPARENT, "")
    return value if len(value) <= MAX_CHARS else ""


def _labels(headers: Headers, header: LabelHeader) -> tuple[tuple[str, str], ...]:
    """The allowed labels; others are left out, as in SGLang."""
    value = headers.get(header.name)
    if value is None:
        return ()
    try:
        given = msgspec.json.decode(value.encode("latin-1"), type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(
            f"the header {header.name} must be a JSON object of labels and their texts", param=header.name
        ) from None
    return tuple([(name, given[name]) for name in header.allowed if name in given])


def _bearer(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _name(headers: Headers, header: str) -> str:
    value = headers.get(header, "")
    if len(value) > MAX_CHARS:
        raise InvalidRequest(
            f"the header {header} has {len(value)} characters; the most is {MAX_CHARS}", param=header
        )
    return value


def _seconds(headers: Headers, header: str) -> float | None:
    value = headers.get(header)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise InvalidRequest(f"the header {header} must be a positive number of seconds", param=header)
    return seconds


def _index(headers: Headers, header: str) -> int | None:
    value = headers.get(header)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise InvalidRequest(f"the header {header} must be the number of a replica, from 0", param=header)
    return int(value)
