"""What a request's headers say about who sends it and how long it may take."""

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

TenantIs = Literal["off", "key", "header"]  # as in --fair-share


class Origin(Struct, frozen=True):
    """Fields of GenerateRequest that come from headers."""

    tenant: str = ""
    routing_key: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None


def origin(headers: Headers, tenant_is: str) -> Origin:
    """Raises InvalidRequest, naming the header."""
    if tenant_is == "key":
        tenant = _key_name(headers.get("authorization") or headers.get("x-api-key") or "")
    else:
        tenant = _name(headers, TENANT) if tenant_is == "header" else ""
    routing_key = next((name for header in ROUTING_KEYS if (name := _name(headers, header))), "")
    return Origin(tenant, routing_key, _seconds(headers, TIMEOUT), _seconds(headers, QUEUE_TIMEOUT))


def _key_name(key: str) -> str:
    """Tells keys apart in metrics without telling the keys."""
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
