"""Request headers with a meaning here: tenant, routing key and time limits."""

from hashlib import blake2b
from math import isfinite
from typing import Literal

from msgspec import Struct
from starlette.datastructures import Headers

from runtime.errors import InvalidRequest

TENANT = "x-tenant-id"
ROUTING_KEYS = ("x-routing-key", "x-smg-routing-key")  # ours, and that of SGLang's gateway
TIMEOUT = "x-request-timeout"  # seconds, from arrival to the end
QUEUE_TIMEOUT = "x-queue-timeout"  # seconds, from arrival to the first step
MAX_CHARS = 256

TenantSource = Literal["off", "key", "header"]  # as in --fair-share


class RequestHeaders(Struct, frozen=True):
    """Fields of a GenerateRequest that come from headers."""

    tenant: str = ""
    routing_key: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None


def read_headers(headers: Headers, tenant_source: str) -> RequestHeaders:
    """The fields that `headers` set; `tenant_source` says what names the tenant. Raises InvalidRequest,
    naming the header."""
    if tenant_source == "key":
        tenant = _key_name(headers.get("authorization") or headers.get("x-api-key") or "")
    else:
        tenant = _name(headers, TENANT) if tenant_source == "header" else ""
    routing_key = next((name for header in ROUTING_KEYS if (name := _name(headers, header))), "")
    return RequestHeaders(tenant, routing_key, _seconds(headers, TIMEOUT), _seconds(headers, QUEUE_TIMEOUT))


def _key_name(key: str) -> str:
    """A tenant's name made of its key: metrics show the name, and never the key."""
    return f"key-{blake2b(key.encode(), digest_size=6).hexdigest()}" if key else ""


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
