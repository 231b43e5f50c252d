"""What anybody may send: bodies made from the OpenAPI document, bodies that break it, and bytes that are no
request at all.

Nothing of it is a 500, nothing of it hangs, and afterwards nothing runs.
"""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from websockets.sync.client import connect

from runtime.http.app import served
from runtime.http.schema.operations import OPERATIONS, Operation
from runtime.http.settings import DEFAULT
from tests.e2e.serving import Server, serve

TIMEOUT_S = 20.0
EXAMPLES = 6  # of each route and mode
LEFT_OUT = ("/pause_generation", "/start_profile")  # these would change what the others find, or write files
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
ROWS = [
    operation
    for operations in OPERATIONS.values()
    for operation in operations
    if operation.path not in LEFT_OUT
]
SERVED = served(DEFAULT)
POSTS = [operation for operation in ROWS if "POST" in operation.methods]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--device", "null", "--context-length", "512") as running:
        yield running
        running.wait(lambda: running.load()["num_total_reqs"] == 0)
        assert running.get("/health_generate").status_code == 200


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", ROWS, ids=lambda operation: operation.path)
def test_bodies_made_from_the_document(
    server: Server, schema: Any, operation: Operation, mode: GenerationMode
) -> None:
    if mode == GenerationMode.NEGATIVE and operation.body is None:
        return  # there is nothing to break
    for method in operation.methods.split():
        documented = schema[operation.path][method]

        @QUICK
        @given(case=documented.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            answer = case.call(base_url=server.url, timeout=TIMEOUT_S)
            check(
                answer.status_code, answer.headers.get("content-type", [""])[0], answer.text, operation.path
            )
            case.validate_response(answer, checks=[response_schema_conformance, content_type_conformance])

        send()


def check(status: int, kind: str, text: str, path: str) -> None:
    # of a request that gives itself no time
    assert status < 500 or (status == 503 and "time was up" in text), text
    if status >= 400:
        error = json.loads(text)["error"]
        assert isinstance(error, str) == path.startswith("/api/"), text
    elif kind.startswith("application/json"):
        json.loads(text)


def broken(body: bytes, random: Random) -> bytes:
    """`body` with something wrong in it."""
    at = random.randrange(len(body))
    pieces = [
        b'"',
        b"{",
        b"[" * 300,
        b"\xff",
        b"\x00",
        b"null",
        b"-1",
        b"1e999",
        b"\\ud800",
        b"9" * 40,
        b"}",
        b",",
        b"true",
        "\u202e".encode(),
    ]
    match random.randrange(4):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + random.choice(pieces) + body[at:]
        case 2:
            return body[:at] + random.choice(pieces) + body[at + random.randrange(1, 8) :]
        case _:
            values = [
                match.span() for match in re.finditer(rb'(?<=:)("[^"]*"|[0-9.]+|true|false|\[.*?\])', body)
            ] or [(at, at)]
            begin, end = random.choice(values)
            return (
                body[:begin]
                + random.choice([*pieces, b"{}", b"[]", b'""', b"[[]]", b'{"a": 1}', b"0", b"-0.0"])
                + body[end:]
            )


@pytest.mark.parametrize("operation", POSTS, ids=lambda operation: operation.path)
def test_bodies_with_something_wrong_in_them(server: Server, operation: Operation) -> None:
    random = Random(operation.path)
    path = re.sub(r"{\w+}", "x", operation.path)
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        for count in range(25):
            example = dict(operation.example) | (
                {"stream": True} if operation.media in ("sse", "ndjson") and count % 2 else {}
            )
            headers = {
                "content-type": random.choice(
                    ["application/json", "text/plain", "multipart/form-data; boundary=x", ""]
                )
            }
            answer = http.post(path, content=broken(json.dumps(example).encode(), random), headers=headers)
            check(answer.status_code, answer.headers.get("content-type", ""), answer.text, operation.path)


NAMES = (
    "authorization",
    "x-api-key",
    "x-request-id",
    "x-request-timeout",
    "x-queue-timeout",
    "x-tenant-id",
    "anthropic-version",
    "accept",
    "accept-encoding",
    "content-type",
    "origin",
    "sec-fetch-site",
    "expect",
    "cookie",
    "x-routing-key",
    "te",
)
VALUES = (
    "",
    "Bearer",
    "Bearer x y",
    "nan",
    "-1",
    "1e-9",
    "é",
    "x" * 9000,
    "application/json; charset=utf-7",
    "0",
    "a\tb",
    '"',
    "100-continue",
)


def test_headers_with_something_wrong_in_them(server: Server) -> None:
    random = Random(5)
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        for _ in range(120):
            operation = random.choice([row for row in POSTS if row.example])
            headers = [
                (random.choice(NAMES).encode(), random.choice(VALUES).encode())
                for _ in range(random.randrange(1, 4))
            ]
            answer = http.post(operation.path, headers=headers, json=dict(operation.example))
            assert answer.status_code not in (500, 501, 502) and answer.headers["x-request-id"], (
                headers,
                answer.text,
            )


def test_messages_over_a_socket_with_something_wrong_in_them(server: Server) -> None:
    random = Random(7)
    rows = [row for row in POSTS if row.path in SERVED]
    with connect(server.url.replace("http", "ws") + "/v1/ws") as socket:
        for count in range(150):
            row = random.choice(rows)
            message = json.dumps(
                {"id": f"x{count}", "path": row.path, "body": {**row.example, "stream": count % 2 == 0}}
            ).encode()
            socket.send(broken(message, random), text=False)
        socket.send(
            json.dumps(
                {
                    "id": "last",
                    "path": "/generate",
                    "body": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
                }
            )
        )
        while "last" != (documented := json.loads(socket.recv(timeout=TIMEOUT_S))).get("id"):
            assert documented.get("status", 0) < 500, documented
        assert "answer" in documented
