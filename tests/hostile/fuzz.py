"""Requests with something wrong in them, made from the examples of all routes: the same for the same seed.

Routes that would change what other clients get by design (a pause, an abort of all, released memory) are left
out, and so are those that write files where an administrator says.
"""

import gzip
import json
import re
from copy import deepcopy
from random import Random
from typing import Any

import msgspec

from runtime.http.auth import level_of
from runtime.http.operation import Operation
from runtime.http.schema.operations import OPERATIONS
from tests.hostile.case import ADMIN_KEY, USER_KEY, Case
from tests.hostile.wire import Reply

LEFT_OUT = (
    *("/pause_generation", "/continue_generation", "/abort_request", "/start_profile", "/stop_profile"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"),
    "/dump_expert_distribution_record",
)
ROWS = [row for rows in OPERATIONS.values() for row in rows if row.path not in LEFT_OUT]
MAX_ERROR_BYTES = 8192
NO_TIME = 503  # of a request that gives itself no time
NO_ROOM = (429, 507)
HEALTH = ("/health", "/ping")  # 503 while ranks are started again

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, -(2**31) - 1, 2**63, 2**64, 10**40),
    *("", " ", "x", "\0", "\ud800", "\udfff\ud800", "\u202e\ufeff", "e\u0301" * 50, "\u4f60\u597d" * 30),
    *("NaN", "-1", "null", "true", "{}", "[]", "{{7*7}}", "%s%n", "../../etc/passwd", "file:///etc/passwd"),
    *(
        "http://169.254.169.254/",
        "\r\nx-a: b\r\n",
        "'; DROP TABLE x; --",
        "\x1b[2J",
        "<|im_end|>",
        "a" * 5000,
    ),
    *([], {}, [[]], [{}], {"": None}, [None] * 70, ["x"] * 70, list(range(300)), {"a": {"a": {"a": {}}}}),
    *({"$ref": "#"}, {"type": "object"}, {"role": "user"}, [{"role": "user", "content": [{}]}], [1e999]),
)
RAW = (
    b'"',
    b"{",
    b"[" * 300,
    b"\xff",
    b"\x00",
    b"\xc0\x80",
    b"-",
    b"1e999",
    b"\\ud800",
    b"9" * 400,
    b"}",
    b",",
    b"NaN",
)
TYPES = (
    *("application/json", "application/json", "application/json; charset=utf-16", "text/plain", ""),
    *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "multipart/form-data", "\x01"),
)
HEADERS = (
    *(
        "x-request-id",
        "x-request-timeout",
        "x-queue-timeout",
        "x-tenant-id",
        "x-routing-key",
        "accept",
        "origin",
    ),
    *("accept-encoding", "cookie", "range", "if-none-match", "anthropic-version", "x-forwarded-for", "te"),
)
VALUES = (
    "",
    "nan",
    "-1",
    "1e-9",
    "0",
    "inf",
    "\xe9",
    "x" * 9000,
    "a\tb",
    '"',
    "{{7*7}}",
    "${jndi:ldap://x}",
    "*",
)
QUERIES = ("limit", "after", "order", "purpose", "stream", "starting_after", "x")
QUERY_VALUES = ("", "-1", "0", "1", "%C2%B2", "%00", "%ff", "9" * 400, "..%2f", "true", "%F0%9F%98%80", "1e3")
NAMES = ("x", "..", "%2e%2e%2fetc", "%00", "%ff", "x" * 3000, "file-0", "%F0%9F%98%80", "%25")
ENCODINGS = ("gzip", "utf-16", "utf-32", "latin-1", "bom")


def fields_of(row: Operation) -> tuple[str, ...]:
    """Names of the top-level fields of a row's body."""
    if row.body is None:
        return ()
    return tuple(field.encode_name for field in msgspec.structs.fields(row.body))


FIELDS = {row.path: fields_of(row) for row in ROWS}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as its container and its key or index there."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found += [(value, key), *places(part)]
    return found


def junk(random: Random) -> Any:
    """A value of its own of the list."""
    return deepcopy(random.choice(JUNK))


def changed_values(body: dict[str, Any], fields: tuple[str, ...], random: Random) -> None:
    """Changes one to three places of a body, or adds fields that the route knows."""
    for _ in range(random.randint(1, 3)):
        at = places(body)
        kind = random.randrange(5)
        if kind == 0 and fields:
            body[random.choice(fields)] = junk(random)
        elif kind == 1:
            body[random.choice(("x", "", "\0", "__class__", "\ud800", "a" * 300))] = junk(random)
        elif at:
            container, key = random.choice(at)
            if kind == 2:
                del container[key]
            elif kind == 3:
                container[key] = [deepcopy(container[key]) for _ in range(random.choice((0, 1, 2, 50)))]
            else:
                container[key] = junk(random)


def changed_bytes(body: bytes, random: Random) -> bytes:
    """Cuts, inserts or replaces bytes of a body."""
    at = random.randrange(len(body) + 1)
    match random.randrange(4):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + random.choice(RAW) + body[at:]
        case 2:
            return body[:at] + random.choice(RAW) + body[at + random.randrange(1, 8) :]
        case _:
            return body.replace(b"{", b'{"a":1,"a":2,', 1)  # a field twice


def encoded(body: bytes, headers: dict[str, str], random: Random) -> bytes:
    """The body in an encoding that the route does not take."""
    encoding = random.choice(ENCODINGS)
    if encoding == "gzip":
        headers["content-encoding"] = random.choice(("gzip", "gzip, gzip", "br", "identity"))
        return gzip.compress(body)
    return (
        b"\xef\xbb\xbf" + body
        if encoding == "bom"
        else body.decode("utf-8", "replace").encode(encoding, "replace")
    )


def target_of(row: Operation, random: Random) -> str:
    """The row's path, with a name in it where it has one, and perhaps a query."""
    path = re.sub(r"{\w+}", lambda _: random.choice(NAMES), row.path)
    if random.random() < 0.2:
        pairs = [
            f"{random.choice(QUERIES)}={random.choice(QUERY_VALUES)}" for _ in range(random.randint(1, 4))
        ]
        path += "?" + "&".join(pairs)
    return path


def fuzzed(seed: int) -> Case:
    """The request of this seed."""
    random = Random(seed)
    row = random.choice(ROWS)
    body: dict[str, Any] = json.loads(json.dumps(dict(row.example)))
    if row.media in ("sse", "ndjson") and random.random() < 0.4:
        body["stream"] = True
    if random.random() < 0.7:
        changed_values(body, FIELDS[row.path], random)
    data = json.dumps(body).encode()
    if random.random() < 0.25:
        data = changed_bytes(data, random)
    headers = {"content-type": random.choice(TYPES) if random.random() < 0.2 else "application/json"}
    if random.random() < 0.05:
        data = encoded(data, headers, random)
    if random.random() < 0.2:
        headers[random.choice(HEADERS)] = random.choice(VALUES)
    method = (
        random.choice(row.methods.split())
        if random.random() < 0.95
        else random.choice(("PUT", "PATCH", "DELETE"))
    )
    key = ADMIN_KEY if level_of(row.path) == "admin" and random.random() < 0.7 else USER_KEY
    return Case(
        f"seed-{seed}",
        target_of(row, random),
        b"" if method == "GET" else data,
        (),
        None,
        method,
        headers,
        key,
    )


def complaint(case: Case, reply: Reply) -> str | None:
    """What is wrong with the answer to a request that may be good or bad: a 5xx, an error without the form of
    its API, or one that is long."""
    if reply.status >= 500 and reply.status != NO_TIME and reply.status not in NO_ROOM:
        return f"{reply.status} {reply.body[:500]!r}"
    if reply.status == NO_TIME and case.path.startswith(HEALTH):
        return None
    if reply.status == NO_TIME and b"time was up" not in reply.body:
        return f"{reply.status} {reply.body[:500]!r}"
    if reply.status < 400 or not reply.body:
        return None
    if len(reply.body) > MAX_ERROR_BYTES:
        return f"an error of {len(reply.body)} bytes"
    try:
        message = reply.error["message"]
    except (ValueError, KeyError, TypeError):
        return f"{reply.status} without an error: {reply.body[:500]!r}"
    return None if message else "an error without a message"
