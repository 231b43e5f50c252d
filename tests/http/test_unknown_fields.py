"""Unknown fields: refused, or ignored with a header and one line in the log for each name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient

from runtime import log
from runtime.http.app import http_app
from runtime.http.errors import UnknownField, decode
from runtime.http.openai.stored_objects import StoredObjects
from runtime.http.settings import HttpSettings
from runtime.http.unknown_fields import MAX_LOGGED, MAX_PLACES, UnknownFields, without
from tests.http.fake import FakeService

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": HI, "max_tokens": 3}


def client(policy: Any = "refuse", service: FakeService | None = None) -> TestClient:
    settings = HttpSettings(unknown_fields=UnknownFields(policy))
    return TestClient(http_app(service or FakeService(), settings))


def warning(response: httpx.Response) -> list[str]:
    return response.headers["warning"].split(": ")[1].rstrip('"').split(", ")


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/api/chat", {"messages": HI, "nonsense": 1}, ["nonsense"]),
        ("/api/chat", {"messages": HI, "options": {"num_gqa": 8, "top_k": 3}}, ["options.num_gqa"]),
        ("/api/chat", {"messages": [{**HI[0], "a": 1}, {**HI[0], "a": 2}]}, ["messages[].a"]),
        (
            "/api/generate",
            {"prompt": "a", "x": 1, "y": {"z": []}, "options": {"w": 0}},
            ["x", "y", "options.w"],
        ),
        ("/api/show", {"nonsense": 1}, []),
    ],
)
def test_ollamas_routes_ignore_them(path: str, body: dict[str, Any], ignored: list[str]) -> None:
    with client() as http:
        for is_stream in (False, True):
            answer = http.post(path, json={"model": "org/fake", "stream": is_stream} | body)
            if path == "/api/show":
                continue
            assert answer.status_code == 200, answer.text
            assert warning(answer) == ignored
        known = http.post("/api/chat", json={"model": "org/fake", "messages": HI, "stream": False})
        assert known.status_code == 200 and "warning" not in known.headers


def test_known_fields_keep_their_effect_and_their_checks() -> None:
    service = FakeService()
    with client(service=service) as http:
        options = {"num_predict": 4, "seed": 2**60, "stop": ["\u2028é"], "num_gqa": 8}
        body = {"model": "org/fake", "messages": HI, "stream": False, "options": options, "more": 1.5}
        assert http.post("/api/chat", json=body).status_code == 200
        params = service.requests[0].params
        assert (params.max_new_tokens, params.seed, params.stop) == (4, 2**60, ("\u2028é",))
        wrong = http.post("/api/chat", json=body | {"options": options | {"top_k": "x"}})
        assert wrong.status_code == 400 and "options.top_k" in wrong.json()["error"]


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/generate", {"text": "a"}),
    ("/v1/messages", {"model": "org/fake", "messages": HI, "max_tokens": 3}),
    ("/pause_generation", {}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_elsewhere_an_option_decides(path: str, body: dict[str, Any]) -> None:
    sent = body | {"nonsense": 1}
    with client() as http:
        refused = http.post(path, json=sent)
        assert refused.status_code == 400 and "nonsense is not a known field" in refused.text
    with client("warn") as http:
        answer = http.post(path, json=sent)
        assert answer.status_code == 200, answer.text
        assert warning(answer) == ["nonsense"]
        streamed = http.post(path, json=sent | ({"stream": True} if "pause" not in path else {}))
        assert warning(streamed)[0] == "nonsense"
        assert "warning" not in http.post(path, json=body).headers


def test_below_the_top_level() -> None:
    service = FakeService()
    with client("warn", service) as http:
        sampling = [{"max_new_tokens": 2, "beams": 1}, {"beams": 2, "top_k": 5, "max_new_tokens": 2}]
        answer = http.post("/generate", json={"text": ["a", "b"], "sampling_params": sampling})
        assert answer.status_code == 200 and warning(answer) == ["sampling_params[].beams"]
        assert service.requests[1].params.top_k == 5
        chat = CHAT | {"stream": True, "stream_options": {"include_usage": True, 'a b\n"é': 1}}
        answer = http.post("/v1/chat/completions", json=chat)
        assert warning(answer) == ["stream_options.a?b???"]


@pytest.fixture
def logging() -> Iterator[None]:
    log.setup()
    yield
    log.silence()


def test_the_log_has_each_name_once_and_not_without_end(
    capsys: pytest.CaptureFixture[str], logging: None
) -> None:
    with client("warn") as http:
        for _ in range(3):
            http.post("/v1/chat/completions", json=CHAT | {"nonsense": 1})
        lines = [line for line in capsys.readouterr().err.splitlines() if "not known here" in line]
        assert len(lines) == 1 and "nonsense" in lines[0]
        many = {f"field{i}": 1 for i in range(MAX_LOGGED + 50)}
        answer = http.post("/v1/chat/completions", json=CHAT | many)
        assert answer.status_code == 200 and len(answer.headers["warning"]) < 1100
        lines = [line for line in capsys.readouterr().err.splitlines() if "not known here" in line]
        assert len(lines) == MAX_LOGGED - 1
    with client("warn") as http:
        answer = http.post("/v1/chat/completions", json=CHAT | {"\n2026 forged" + "x" * 10**6: 1})
        (line,) = capsys.readouterr().err.splitlines()
        assert len(line) < 300 and "?2026?forged" in line and len(answer.headers["warning"]) < 300


def test_sockets_and_batches_ignore_them_too(tmp_path: Path) -> None:
    service = FakeService()
    unknown_fields = UnknownFields("warn")
    stored = StoredObjects(service, tmp_path, 2**20, unknown_fields=unknown_fields)
    app = http_app(service, HttpSettings(unknown_fields=unknown_fields), stored)
    with TestClient(app) as http, http.websocket_connect("/v1/ws") as socket:
        socket.send_json({"id": "1", "path": "/v1/chat/completions", "body": CHAT | {"nonsense": 1}})
        assert "answer" in socket.receive_json()
    assert stored.storage is not None
    serve = stored.storage.batches.endpoints["/v1/chat/completions"]
    assert serve(service, json.dumps(CHAT | {"nonsense": 1}).encode()) is not None
    stored.close()


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    a: int = 0


class Body(msgspec.Struct, forbid_unknown_fields=True):
    one: Inner | None = None
    by_name: dict[str, Inner] = {}
    several: list[Inner] = []


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ({"one": {"a": 1}, "x": 1, "y": 2}, {"one": {"a": 1}}),
        ({"one": {"a": 1, "x": {"a": 3}}}, {"one": {"a": 1}}),
        ({"by_name": {"k.[0]": {"x": 1, "a": 2}, "l": {}}}, {"by_name": {"k.[0]": {"a": 2}, "l": {}}}),
        ({"several": [{}, {"x": 1}, {"x": 2, "a": 1}]}, {"several": [{}, {}, {"a": 1}]}),
    ],
)
def test_what_is_left_of_a_body(sent: Any, left: Any) -> None:
    taken, ignored = UnknownFields("warn").attempt(
        lambda body: decode(body, msgspec.json.Decoder(Body)), json.dumps(sent).encode(), "/x"
    )
    assert taken == msgspec.convert(left, Body) and ignored


def test_too_many_places_are_refused() -> None:
    sent = {"several": [{"a": 1, f"x{i}": 1} for i in range(MAX_PLACES + 1)]}
    with pytest.raises(UnknownField):
        UnknownFields("warn").attempt(
            lambda body: decode(body, msgspec.json.Decoder(Body)), json.dumps(sent).encode(), "/x"
        )


def test_a_large_body_is_made_anew_twice_at_most() -> None:
    """Each time holds up the event loop."""
    decoder = msgspec.json.Decoder(Body)
    counts = []
    for count in (2, 3):
        reads: list[int] = []

        def take(body: bytes, reads: list[int] = reads) -> Body:
            reads.append(len(body))
            return decode(body, decoder)

        inner = [{"a": 1, f"x{i}": 1} for i in range(count)] + [{"a": 1}] * 200_000
        sent = json.dumps({"several": inner}).encode()
        if count == 2:
            assert len(UnknownFields("warn").attempt(take, sent, "/x")[1]) == 2
        else:
            with pytest.raises(UnknownField):
                UnknownFields("warn").attempt(take, sent, "/x")
        counts.append(len(reads))
    assert counts == [3, 3]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": 1}', b'{"several": 3, "x": [[[', b'{"one": [1]}'])
def test_a_body_that_has_no_such_field_stays_refused(body: bytes) -> None:
    assert without(body, UnknownField("", parent="one", name="x")) is None
