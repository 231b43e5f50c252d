"""Headers, priorities and pace: what of a request besides its prompt reaches the runtime."""

import json

import httpx
import pytest
from starlette.datastructures import Headers

from runtime.errors import InvalidRequest
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.fields.headers import RequestHeaders, read_headers
from runtime.http.settings import DEFAULT, HttpSettings
from runtime.http.streaming.pace import Pace
from runtime.messages.requests import Delta, Finish, FinishReason, GenerateRequest, Sink
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
}


def client(service: FakeService, settings: HttpSettings = DEFAULT) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service, settings)), base_url="http://test"
    )


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, RequestHeaders()),
        ({"x-tenant-id": "a"}, RequestHeaders()),
        ({"x-routing-key": "r"}, RequestHeaders(routing_key="r")),
        ({"x-smg-routing-key": "r"}, RequestHeaders(routing_key="r")),
        (
            {"x-request-timeout": "2.5", "x-queue-timeout": "1"},
            RequestHeaders(timeout_s=2.5, queue_timeout_s=1.0),
        ),
    ],
)
def test_headers(headers: dict[str, str], expected: RequestHeaders) -> None:
    assert read_headers(Headers(headers)) == expected


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
@pytest.mark.parametrize("header", ["x-request-timeout", "x-queue-timeout"])
def test_timeouts_are_positive(header: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_headers(Headers({header: value}))
    assert caught.value.param == header


@pytest.mark.parametrize("path", BODIES)
async def test_what_reaches_the_service(path: str) -> None:
    service = FakeService()
    requests = []
    submit = service.submit

    def note(request: GenerateRequest, sink: Sink) -> None:
        requests.append(request)
        submit(request, sink)

    service.submit = note  # type: ignore[method-assign]
    async with client(service, HttpSettings(keys=Keys(by_header=True))) as http:
        headers = {"x-tenant-id": "t", "x-routing-key": "r", "x-request-timeout": "9"}
        assert (
            await http.post(path, json=BODIES[path] | {"priority": -(2**63)}, headers=headers)
        ).status_code == 200
        assert (await http.post(path, json=BODIES[path])).status_code == 200
    assert [(a.priority, a.tenant.name, a.routing_key, a.timeout_s) for a in requests] == [
        (-(2**63), "t", "r", 9.0),
        (None, "", "", None),
    ]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("priority", [2**63, "1", 1.5, [1]])
async def test_a_priority_is_an_int64(path: str, priority: object) -> None:
    async with client(FakeService()) as http:
        answer = await http.post(path, json=BODIES[path] | {"priority": priority})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "priority"


def test_pace() -> None:
    seen: list[tuple[int, str, list[int], bool]] = []
    pace = Pace(lambda choice, d: seen.append((choice, d.text, d.token_ids, d.finish is not None)), 3)
    for i in range(8):
        pace(0, Delta(0, str(i), [i]))
        if i < 2:
            pace(1, Delta(1, "x", [i]))
    pace(0, Delta(0, "", [], finish=Finish(FinishReason.LENGTH, None, 1, 8, 0)))
    assert [s for s in seen if s[0] == 0] == [
        (0, "0", [0], False),
        (0, "123", [1, 2, 3], False),
        (0, "456", [4, 5, 6], False),
        (0, "7", [7], True),
    ]
    assert [s for s in seen if s[0] == 1] == [(1, "x", [0], False)]


@pytest.mark.parametrize("interval", [1, 4, 1000])
@pytest.mark.parametrize("is_disjoint", [False, True])
async def test_streams_say_the_same_at_any_pace(interval: int, is_disjoint: bool) -> None:
    async with client(
        FakeService(), HttpSettings(stream_interval=interval, stream_output=is_disjoint)
    ) as http:
        body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 10}}
        lines = (await http.post("/generate", json=body)).text.split("\n\n")
        whole = (await http.post("/generate", json=body | {"stream": False})).json()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    texts = [event["text"] for event in events]
    assert ("".join(texts) if is_disjoint else texts[-1]) == whole["text"]
    assert (
        events[-1]["meta_info"]["completion_tokens"] == 10
        and events[-1]["meta_info"]["finish_reason"] is not None
    )
