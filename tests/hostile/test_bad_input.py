"""Values that no client should send, where they may stand: query parameters, headers, ids in paths, adapters.

Each is the client's error: none is answered 5xx, and the server answers well afterwards. Bodies have tests of
their own in tests/e2e/test_contract.py.
"""

import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from urllib.parse import quote, urlsplit

import httpx
import pytest

from runtime.errors import ModelError
from runtime.http.schema.operations import OPERATIONS, Operation
from runtime.models.config.lora_targets import lora_modules
from runtime.models.config.model_config import read_config
from runtime.models.config.peft import read_adapter
from tests.e2e.serving import Server, serve
from tests.hostile import adapters

TIMEOUT_S = 60.0
POCKET = Path(__file__).parents[2] / "runtime/pocket"
# of routes that would change what the others find, or whose answers have no end
LEFT_OUT = {"/pause_generation", "/start_profile", "/release_memory_occupation", "/update_weights_from_disk"}
ROWS = [row for rows in OPERATIONS.values() for row in rows if row.path not in LEFT_OUT]
NUMBERS = ["²", "٣", "9" * 5000, "-1", "0", "1e3", "+5", "1_0", " 5", "", "0x10", "∞", "nan", "\0"]
NUMBERS += ["10001"]
IDS = [
    "²",
    "..",
    "%2e%2e%2f",
    "\0",
    "x" * 5000,
    "'; DROP TABLE responses",
    "%",
    "\ud800",
    "a/b",
    "😀",
    "-",
    "*",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    options = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all")
    with serve("--device", "null", "--file-storage-path", str(store), *options) as running:
        yield running
        assert running.get("/health_generate").status_code == 200


@pytest.fixture(scope="module")
def stored(server: Server) -> str:
    """The id of a response whose events are stored."""
    body = {"model": "pocket", "input": "hi", "max_output_tokens": 2, "background": True, "stream": True}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=TIMEOUT_S)
    first = json.loads(next(line for line in answer.text.splitlines() if line.startswith("data: "))[6:])
    return str(first["response"]["id"])


def escaped(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="%")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files?limit={}",
        "/v1/batches?limit={}",
        "/v1/responses/{id}/input_items?limit={}",
        "/v1/responses/{id}?stream=true&starting_after={}",
    ],
)
def test_numbers_in_a_query_that_are_none(server: Server, stored: str, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        for value in NUMBERS:
            answer = http.get(path.format(escaped(value), id=stored))
            if "starting_after" in path and value in ("0", "10001"):  # events before it, and behind the last
                assert answer.status_code == 200
                continue
            assert answer.status_code == (200 if value == "10001" and "nothing" in path else 400), value
            assert answer.json()["error"]["param"] in ("limit", "starting_after")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_ids_and_queries_of_every_route(server: Server, row: Operation) -> None:
    random = Random(row.path)
    names = [*row.query, "limit", "after", "order", "stream", "purpose", "x"]
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        for method in row.methods.split():
            for one in random.sample([*IDS, *NUMBERS], 9):
                path = row.path if "{" not in row.path else row.path.partition("{")[0] + escaped(one)
                query = "&".join(f"{name}={escaped(random.choice([*IDS, *NUMBERS]))}" for name in names)
                answer = http.request(method, f"{path}?{query}", json=row.example or None)
                assert answer.status_code < 500, (method, path, query, answer.text)


def raw(server: Server, data: bytes) -> bytes:
    """The first line of what the server answers to these bytes; it must answer or close."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(data)
        answer = b""
        while b"\r\n" not in answer and (more := sock.recv(4096)):
            answer += more
    return answer.partition(b"\r\n")[0]


ORIGINS = [b"http://[", b"http://[::1", b"http://]", b"\xff", b"null", b"http://a:99999999", b"//", b"", b"["]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("host", [b"host: x\r\n", b"host: \r\n", b"host: [\r\n"])
def test_origins_that_are_none(server: Server, origin: bytes, host: bytes) -> None:
    head = b"GET /v1/ws HTTP/1.1\r\n%bupgrade: websocket\r\nconnection: upgrade\r\norigin: %b\r\n" % (
        host,
        origin,
    )
    key = b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    assert raw(server, head + key).split()[1] in (b"403", b"400")


LENGTHS = [b"\xb2", b"9" * 5000, b"9" * 18, b"1_0", b"+5", b"-5", b"0x5", b"5, 5", b""]


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: repr(length[:8]))
@pytest.mark.parametrize("path", [b"/generate", b"/v1/batches", b"/v1/files", b"/nowhere"])
def test_lengths_of_bodies_that_are_none(server: Server, length: bytes, path: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %b\r\n\r\n{}"
    status = raw(server, head % (path, length)).split()[1]
    assert status.startswith(b"4"), status


HEADERS = (
    "x-request-timeout",
    "x-queue-timeout",
    "x-tenant-id",
    "x-routing-key",
    "x-request-id",
    "authorization",
    "x-api-key",
    "accept",
    "content-type",
    "range",
    "if-range",
    "cookie",
    "host",
    "origin",
    "expect",
    "content-encoding",
    "forwarded",
)
VALUES = (
    b"\xb2",
    b"9" * 5000,
    b"-1",
    b"nan",
    b"1e999",
    b"bytes=5-1",
    b"bytes=\xb2-",
    b"[",
    b"\xff" * 9,
    b'a;b="',
    b"",
)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_every_value(server: Server, name: str) -> None:
    rows = [row for row in ROWS if "{" not in row.path and "GET" in row.methods or row.serve is not None]
    for value, row in zip(itertools.cycle(VALUES), Random(name).sample(rows, 12), strict=False):
        body = json.dumps(dict(row.example)).encode() if row.example else b""
        method = "POST" if row.serve is not None else "GET"
        more = b"" if name == "host" else b"host: x\r\n"
        head = (
            f"{method} {row.path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n".encode()
        )
        first = raw(server, head + more + name.encode() + b": " + value + b"\r\n\r\n" + body)
        assert b" 50" not in first or b" 503" in first, (row.path, value, first)


@pytest.mark.parametrize(
    "path", ["/tmp/\0x", "", "/dev/zero", "/proc/self/mem", "x" * 5000, "/", "~", "\udc80"]
)
def test_paths_of_adapters_that_are_none(server: Server, path: str) -> None:
    body = json.dumps({"lora_name": "a", "lora_path": path})
    answer = httpx.post(f"{server.url}/load_lora_adapter", content=body, timeout=TIMEOUT_S)
    assert answer.status_code == 400, answer.text


@pytest.fixture(scope="module")
def modules() -> dict[str, tuple[int, int]]:
    found = lora_modules(read_config(POCKET))
    return {name: found[name] for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")}


@pytest.mark.parametrize("what", adapters.BROKEN)
def test_an_adapter_that_is_broken_is_refused(
    server: Server, modules: dict[str, tuple[int, int]], tmp_path: Path, what: str
) -> None:
    adapters.BROKEN[what](folder := adapters.write(tmp_path / "adapter", modules))
    with pytest.raises(ModelError, match="adapter"):
        read_adapter(str(folder), modules)
    body = {"lora_name": what, "lora_path": str(folder)}
    answer = httpx.post(f"{server.url}/load_lora_adapter", json=body, timeout=TIMEOUT_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")


def test_the_adapter_that_they_are_made_of_is_good(
    server: Server, modules: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    body = {"lora_name": "good", "lora_path": str(adapters.write(tmp_path / "adapter", modules))}
    answer = httpx.post(f"{server.url}/load_lora_adapter", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
